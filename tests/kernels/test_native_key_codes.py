"""The CPU kernel keeps and uses key codes as the reference says."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.served_layer import ServedLayer, Shape
from tests.kernels.step_checks import check_step
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, pack_codes
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
ESTIMATED = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2, estimated_remainder=True)
TOPK = SelectionSpec(ranked=True, max_pages=5)
LIGHTEST = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("code_bits", [1, 2])
def test_stored_codes_are_the_reference_s(isa: str, dtype: torch.dtype, head_dim: int, code_bits: int) -> None:
    shape = Shape(isa=isa, dtype=dtype, head_dim=head_dim, summary="key_codes", code_bits=code_bits)
    layer = ServedLayer(shape, num_blocks=6)
    request = layer.start()
    for count in (70, 1, 1, 13, 11):  # pages filled at once, and token by token
        layer.step([(request, count)], key_offset=0.5)
    differing = total = 0
    for index, block in enumerate(request.blocks):
        _, _, stored = shape.layout.unpack(layer.kv_cache[block], shape.num_kv_heads)
        full_pages = min(shape.layout.pages_per_block, len(request.key) // 16 - index * shape.layout.pages_per_block)
        keys = request.key[index * shape.block_tokens :][: 16 * full_pages]
        for head in range(shape.num_kv_heads):
            expected = pack_codes(encode_keys(keys[:, head], code_bits), keys.element_size())
            differing += int((stored[head, :full_pages] != expected).sum())
            total += expected.numel()
    assert differing <= 0.002 * total  # a float32 sum on the edge of two codes


def decode_steps(
    shape: Shape,
    selection: SelectionSpec,
    *,
    sharpness: float,
    steps: int = 6,
    lengths: tuple[int, ...] = (700, 330),
) -> list[str]:
    """Decode some steps of requests and check each. Returns the rows whose plans were within rounding of another."""
    layer = ServedLayer(shape, num_blocks=(sum(lengths) + 70) // shape.block_tokens + 4)
    rows = [(layer.start(), length) for length in lengths]
    layer.step(rows, attend=False)
    excuses = []
    for _ in range(steps):
        step = layer.step(
            [(request, 1) for request, _ in rows], selection=selection, retained=RETAINED, sharpness=sharpness
        )
        excuses += check_step(layer, step)
    return excuses


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("selection", [ESTIMATED, TOPK], ids=["estimated", "topk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("code_bits", [1, 2])
def test_pages_read_are_the_reference_s(
    isa: str, selection: SelectionSpec, dtype: torch.dtype, group: int, code_bits: int
) -> None:
    shape = Shape(isa=isa, dtype=dtype, num_q_heads=2 * group, summary="key_codes", code_bits=code_bits)
    assert len(decode_steps(shape, selection, sharpness=2.0)) <= 4  # of 24 rows


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("selection", [ESTIMATED, TOPK], ids=["estimated", "topk"])
def test_long_rows_are_scored_in_several_parts(selection: SelectionSpec, num_threads: int) -> None:
    """Parts are 128 pages on one thread, and otherwise a thread's share."""
    shape = Shape(summary="key_codes", num_threads=num_threads)
    assert len(decode_steps(shape, selection, sharpness=2.0, steps=2, lengths=(4200, 330))) <= 2  # of 8 rows


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code_bits", [1, 2])
def test_wide_heads(isa: str, dtype: torch.dtype, code_bits: int) -> None:
    """The heads are wider than one pass over a code takes."""
    shape = Shape(isa=isa, dtype=dtype, head_dim=256, scale=0.0625, summary="key_codes", code_bits=code_bits)
    assert len(decode_steps(shape, ESTIMATED, sharpness=2.0, steps=3)) <= 2  # of 12 rows


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("code_bits", [1, 2])
@pytest.mark.parametrize("block_tokens", [16, 128])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_shapes_and_threads(head_dim: int, code_bits: int, block_tokens: int, num_threads: int) -> None:
    shape = Shape(
        head_dim=head_dim,
        code_bits=code_bits,
        block_tokens=block_tokens,
        num_threads=num_threads,
        num_q_heads=6,
        summary="key_codes",
        scale=head_dim**-0.5,
    )
    assert len(decode_steps(shape, ESTIMATED, sharpness=2.0)) <= 4


@pytest.mark.parametrize("threshold", [0.3, 0.99, 1.0])
@pytest.mark.parametrize("sharpness", [0.2, 6.0], ids=["flat", "peaky"])
@pytest.mark.parametrize("microbatch_pages", [1, 16])
def test_thresholds(threshold: float, sharpness: float, microbatch_pages: int) -> None:
    selection = SelectionSpec(
        ranked=True, threshold=threshold, microbatch_pages=microbatch_pages, estimated_remainder=True
    )
    assert len(decode_steps(Shape(summary="key_codes"), selection, sharpness=sharpness)) <= 4


def test_a_retained_set_that_is_enough_reads_nothing_else() -> None:
    layer = ServedLayer(Shape(summary="key_codes", num_q_heads=2), num_blocks=30)
    request = layer.start()
    layer.step([(request, 600)])
    wide = RetainedSet(sink_tokens=0, window_tokens=560)
    selection = SelectionSpec(ranked=True, threshold=0.5, estimated_remainder=True)
    check_step(layer, layer.step([(request, 1)], selection=selection, retained=wide, sharpness=0.1))
    assert layer.attention.last_plan(0, 0) == []


def test_an_estimated_remainder_needs_key_codes() -> None:
    layer = ServedLayer(Shape(summary="minmax"), num_blocks=4)
    with pytest.raises(KernelError, match=r"^estimated_remainder=True: needs summary key_codes, not minmax$"):
        layer.step([(layer.start(), 40)], selection=ESTIMATED)


@pytest.mark.parametrize("selection", [ESTIMATED, LIGHTEST, TOPK], ids=["estimated", "lightest", "topk"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("sharpness", [0.2, 3.0], ids=["flat", "peaky"])
def test_unread_weight_goes_to_the_candidates_read(
    selection: SelectionSpec, share: float, group: int, num_threads: int, sharpness: float
) -> None:
    shape = Shape(num_q_heads=2 * group, num_threads=num_threads, summary="key_codes")
    attributed = replace(selection, attributed=share)
    assert len(decode_steps(shape, attributed, sharpness=sharpness, steps=3)) <= 4  # of 12 rows


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "selection",
    [ESTIMATED, replace(ESTIMATED, threshold=0.99), SelectionSpec(ranked=True, max_pages=30)],
    ids=["0.9", "0.99", "topk"],
)
def test_little_left_of_estimates_that_were_too_high(isa: str, dtype: torch.dtype, selection: SelectionSpec) -> None:
    """One bit overestimates pages that sharp queries look for, so what is left counts even where it is little."""
    shape = Shape(isa=isa, dtype=dtype, num_q_heads=6, summary="key_codes", code_bits=1)
    assert len(decode_steps(shape, replace(selection, attributed=0.5), sharpness=6.0)) <= 1  # of 24 rows


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("selection", [ESTIMATED, TOPK], ids=["estimated", "topk"])
@pytest.mark.parametrize("code_bits", [1, 2])
def test_tokens_far_above_their_page_s_mean(isa: str, selection: SelectionSpec, code_bits: int) -> None:
    """Scores deviate by 30, so the best tokens lie e^100 above the mean of their page."""
    shape = Shape(isa=isa, dtype=torch.bfloat16, num_q_heads=6, summary="key_codes", code_bits=code_bits)
    assert len(decode_steps(shape, selection, sharpness=30.0)) <= 5  # of 24 rows


def decode_few(query: Tensor, page_keys: Tensor, last_key: Tensor, selection: SelectionSpec) -> list[int]:
    """Decode one row of two heads over pages with one key each, a page of zeros and a last token; the pages read."""
    shape = Shape(
        dtype=torch.float32, num_q_heads=2, num_kv_heads=1, head_dim=16, scale=1.0, summary="key_codes", code_bits=2
    )
    tokens = torch.zeros(16 * len(page_keys) + 17, 4, 16)  # two queries, key and value
    tokens[-1, :2], tokens[-1, 2], tokens[:, 3] = query, last_key, torch.randn(len(tokens), 16)
    tokens[:-17, 2] = page_keys.repeat_interleave(16, dim=0)
    layer = ServedLayer(shape, num_blocks=len(tokens) // shape.block_tokens + 2)
    request = layer.start()
    layer.step([(request, len(tokens) - 1)], tokens=tokens[:-1])
    retained = RetainedSet(sink_tokens=0, window_tokens=16)
    step = layer.step([(request, 1)], tokens=tokens[-1:], selection=selection, retained=retained)
    assert not check_step(layer, step)
    return layer.attention.last_plan(0, 0)


@pytest.mark.parametrize(("top", "fall"), [(100.0, 10.0), (300.0, 150.0), (700.0, 150.0)])
def test_a_head_that_has_enough_does_not_hold_up_its_group(top: float, fall: float) -> None:
    """One head has all its weight in the window, by up to e^700; what the other lacks decides."""
    keys = torch.zeros(20, 16)
    keys[:, 0] = -fall * torch.arange(20)
    query, last = torch.zeros(2, 16), torch.zeros(16)
    query[0, 0], last[0] = 1.0, top
    assert len(decode_few(query, keys, last, replace(ESTIMATED, threshold=0.5, microbatch_pages=1))) == 10  # of 20


@pytest.mark.parametrize("below", [20.0, 58.0, 70.0, 100.0, 500.0])
def test_what_is_read_stands_for_the_unread_however_little_it_weighs(below: float) -> None:
    """One head chooses the only page, which weighs nothing to the other."""
    keys = torch.zeros(8, 16)
    keys[3, 0], keys[3, 1] = -below, 30.0
    query = torch.zeros(2, 16)
    query[0, 0], query[1, 1] = 1.0, 1.0
    assert decode_few(query, keys, torch.zeros(16), replace(TOPK, max_pages=1, attributed=0.5)) == [3]


def test_a_threshold_just_below_one_is_one_that_stops() -> None:
    layer = ServedLayer(Shape(summary="key_codes"), num_blocks=24)
    request = layer.start()
    layer.step([(request, 600)])
    layer.attention.reset_stats()
    layer.step([(request, 1)], selection=replace(ESTIMATED, threshold=1 - 1e-9), retained=RETAINED)
    assert layer.attention.stats().judged == 2


def test_the_share_that_is_attributed_shows() -> None:
    """Outputs over the same pages change with the share, but not if everything is read."""
    read: list[int] = []

    def outputs(selection: SelectionSpec) -> list[Tensor]:
        layer = ServedLayer(Shape(summary="key_codes"), num_blocks=30)
        request = layer.start()
        layer.step([(request, 600)])
        found = [layer.step([(request, 1)], selection=selection, retained=RETAINED).output for _ in range(2)]
        read.append(len(layer.attention.last_plan(0, 0)))
        return found

    left_out, half, whole = (outputs(replace(TOPK, attributed=share)) for share in (0.0, 0.5, 1.0))
    for a, b, c in zip(left_out, half, whole, strict=True):
        assert (b - a).norm() > 0.01 * a.norm()
        assert (c - a).norm() > 1.2 * (b - a).norm()
    read.clear()
    everything = SelectionSpec(ranked=True, threshold=0.999999, estimated_remainder=True)
    for a, b in zip(outputs(everything), outputs(replace(everything, attributed=1.0)), strict=True):
        assert torch.equal(a, b)
    first_page, end_page = RETAINED.candidate_range(602)
    assert read == [end_page - first_page] * 2
