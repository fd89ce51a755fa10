// A small matrix product in registers, C = A B of plain rows, for the ops that are made of such. No guard: included once per level, inside
// the part of a file that each_level.h compiles.
//
// Each number of C is one sum in the order of k, whatever the shapes: it does not depend on which rows are multiplied together.
namespace tw {
namespace TW_NS {
namespace {

// Register tiles of a product: rows of A x vectors of B.
#if TW_LEVEL == 2
constexpr int LINES = 6, VECS = 4;
#elif TW_LEVEL == 1
constexpr int LINES = 6, VECS = 1;
#else
constexpr int LINES = 2, VECS = 1;
#endif

TW_INLINE float one(F32*, const float* p) { return *p; }
TW_INLINE float one(F16*, const uint16_t* p) { return half_to_float(*p); }
TW_INLINE float one(BF16*, const uint16_t* p) { return bf16_to_float(*p); }

// C[m][n] = (Adding: +) sum over k of A[m][k] B[k][n], k in order; lines are lda, ldb, ldc apart.
template <class A, class B, bool Adding, int L, int N>
void product_tile(int64_t depth, const typename A::Stored* a, int64_t lda, const typename B::Stored* b, int64_t ldb, float* c, int64_t ldc) {
    Wide sum[L][N];
    for (int l = 0; l < L; ++l)
        for (int n = 0; n < N; ++n) sum[l][n] = Adding ? wide_load<F32>(c + l * ldc + n * W) : wide_splat(0);
    for (int64_t k = 0; k < depth; ++k) {
        Wide row[N];
        for (int n = 0; n < N; ++n) row[n] = wide_load<B>(b + k * ldb + n * W);
        for (int l = 0; l < L; ++l) {
            const Wide x = wide_splat(one((A*)nullptr, a + l * lda + k));
            for (int n = 0; n < N; ++n) sum[l][n] = wide_fma(x, row[n], sum[l][n]);
        }
    }
    for (int l = 0; l < L; ++l)
        for (int n = 0; n < N; ++n) wide_store(c + l * ldc + n * W, sum[l][n]);
}
template <class A, class B, bool Adding, int N>
void product_column(int64_t lines, int64_t depth, const typename A::Stored* a, int64_t lda, const typename B::Stored* b, int64_t ldb, float* c,
                    int64_t ldc) {
    for (; lines >= LINES; lines -= LINES, a += LINES * lda, c += LINES * ldc)
        product_tile<A, B, Adding, LINES, N>(depth, a, lda, b, ldb, c, ldc);
    if constexpr (LINES > 4)
        if (lines >= 4) product_tile<A, B, Adding, 4, N>(depth, a, lda, b, ldb, c, ldc), lines -= 4, a += 4 * lda, c += 4 * ldc;
    if constexpr (LINES > 2)
        if (lines >= 2) product_tile<A, B, Adding, 2, N>(depth, a, lda, b, ldb, c, ldc), lines -= 2, a += 2 * lda, c += 2 * ldc;
    if (lines) product_tile<A, B, Adding, 1, N>(depth, a, lda, b, ldb, c, ldc);
}
// columns: a multiple of 16.
template <class A, class B, bool Adding>
void product(int64_t lines, int64_t columns, int64_t depth, const typename A::Stored* a, int64_t lda, const typename B::Stored* b, int64_t ldb,
             float* c, int64_t ldc) {
    int64_t n = 0;
    for (; n + VECS * W <= columns; n += VECS * W) product_column<A, B, Adding, VECS>(lines, depth, a, lda, b + n, ldb, c + n, ldc);
    for (; n < columns; n += W) product_column<A, B, Adding, 1>(lines, depth, a, lda, b + n, ldb, c + n, ldc);
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
