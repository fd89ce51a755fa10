"""The memory ledger against arithmetic done another way, and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.host.plans import CARDS, GEMMA_270M, SMOLLM2, SMOLLM2_BF16, MiB
from tradewind.config import ledger
from tradewind.config.card import ModelCard
from tradewind.config.kv_sizing import Sizing, fit, groups_of, pool_bytes, sequence_pages
from tradewind.config.sizes import option_bytes, parse_bytes, show_bytes
from tradewind.contract.errors import UserError
from tradewind.quantization.blocks import BLOCKS


def test_bits_in_files_are_those_of_the_formats() -> None:
    assert {name: float(bits) for name, bits in ledger.FILE_BITS.items()} == {
        name: block.bits_per_value for name, block in BLOCKS.items()
    }


def test_weights_of_smollm2() -> None:
    """Packed for int8 the file's blocks keep their size; unpacked they are 2 or 4 bytes a weight."""
    assert ledger.matmul_bytes(SMOLLM2, compute="int8", quantization="none") == pytest.approx(
        SMOLLM2.weight_bytes, rel=0.001
    )
    assert ledger.matmul_bytes(SMOLLM2, compute="bf16", quantization="none") == 2 * SMOLLM2.parameters
    assert ledger.matmul_bytes(SMOLLM2, compute="f32", quantization="none") == 4 * SMOLLM2.parameters
    assert ledger.embedding_bytes(SMOLLM2) == 30081024


def test_an_untied_table_is_not_counted_twice() -> None:
    tied = SMOLLM2_BF16
    table = tied.vocab_size * tied.hidden
    untied = ModelCard(
        **{
            **{name: getattr(tied, name) for name in ModelCard.__struct_fields__},
            "tied_embeddings": False,
            "parameters": tied.parameters + table,
            "weight_formats": {"BF16": tied.parameters + table},
        }
    )
    for compute in ("f32", "bf16"):
        same = ledger.matmul_bytes(tied, compute=compute, quantization="none")
        assert ledger.matmul_bytes(untied, compute=compute, quantization="none") == same


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_lines_add_up(card: ModelCard, compute: str) -> None:
    shape = ledger.Shape(
        backend="cpu",
        compute=compute,
        quantization="none",
        max_tokens_per_step=512,
        max_running=8,
        max_context=1024,
        page_tokens=16,
    )
    lines = ledger.fixed_lines(card, shape)
    assert all(line.bytes > 0 and line.how for line in lines)
    assert len({line.name for line in lines}) == len(lines)
    assert ledger.total_bytes(lines) == sum(line.bytes for line in lines)


def test_kv_line_shows_its_arithmetic() -> None:
    (group,) = groups_of(SMOLLM2, page_tokens=16, format="f16")
    line = ledger.kv_line(group, pages=10)
    assert line.bytes == 10 * 16 * 30 * 2 * 3 * 64 * 2
    assert line.how.startswith("10 pages x 16 tokens x 30 layers x 2 x 3 heads x 64 f16")


def test_gemma_has_two_groups_and_windows_stay_small() -> None:
    """15 windowed layers keep at most window, chunk and one page more, however long the sequence is."""
    full, window = groups_of(GEMMA_270M, page_tokens=16, format="f16")
    assert (full.kind, full.layers) == ("full", (5, 11, 17))
    assert (window.kind, window.window, len(window.layers)) == ("window", 512, 15)
    assert sorted(full.layers + window.layers) == list(range(18))
    assert sequence_pages(full, tokens=32768, max_tokens_per_step=512) == 2048
    assert sequence_pages(window, tokens=32768, max_tokens_per_step=512) == 32 + 32 + 1
    assert sequence_pages(window, tokens=100, max_tokens_per_step=512) == 7


@given(
    card=st.sampled_from(CARDS),
    context=st.integers(1, 200_000),
    step=st.integers(1, 4096),
    sequences=st.integers(0, 300),
    each=st.integers(1, 4096),
    page=st.sampled_from([1, 16, 32, 128]),
    budget=st.integers(0, 1 << 36),
)
def test_fit_is_the_largest_that_fits(
    card: ModelCard, context: int, step: int, sequences: int, each: int, page: int, budget: int
) -> None:
    groups = groups_of(card, page_tokens=page, format="f16")
    sizing = Sizing(max_context=context, max_tokens_per_step=step, sequences=sequences, tokens_each=min(each, context))
    pools = fit(groups, sizing=sizing, budget=budget)
    if pools is None:
        assert pool_bytes(groups, sizing=sizing, sequences=0) > budget
        return
    assert pool_bytes(groups, sizing=sizing, sequences=pools.sequences) <= budget
    assert pools.sequences == sequences or pool_bytes(groups, sizing=sizing, sequences=pools.sequences + 1) > budget
    for group, pages in zip(groups, pools.pages, strict=True):
        assert pages - 1 >= sequence_pages(group, tokens=context, max_tokens_per_step=step), (
            "the longest sequence fits beside the null page"
        )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", MiB),
        ("2GiB", 2048 * MiB),
        ("2 gib", 2048 * MiB),
        ("2g", 2048 * MiB),
        ("1.5GB", 1_500_000_000),
        ("512MB", 512_000_000),
        (".5k", 512),
        (" 64 KiB ", 65536),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "1e9", "1 GiB extra", "12XB", "nan", "9" * 30, "9999999TiB", "٣GiB", "0.1"]
)
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"(no|no usable) size"):
        parse_bytes(text)


@given(st.integers(1, 1 << 59))
def test_advised_limits_hold_what_they_are_for(size: int) -> None:
    assert size <= parse_bytes(option_bytes(size)) < size + MiB
    assert show_bytes(size).split()[1] in ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def test_sizes_are_shown_short() -> None:
    assert [show_bytes(size) for size in (0, 1023, 1024, 96576768, 1 << 30, 1048575 * 1024)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "92.1 MiB",
        "1.0 GiB",
        "1.0 GiB",
    ]
