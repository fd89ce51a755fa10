#include "gemm.h"
#if defined(__x86_64__)
namespace tw { Path avx2_path(const Packed& p) { return portable_path(p); } }
#endif
