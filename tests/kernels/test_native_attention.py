"""The CPU kernel against the whole-batch reference: shapes, dtypes, instruction sets, lengths, kinds of rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from tests.kernels.step_checks import check_step
from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas
from vllm_hybrid_sparse.settings import ISAS
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
DENSE = SelectionSpec()
TOPK = SelectionSpec(ranked=True, max_pages=3)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
GEOMETRIES = {  # (query heads, KV heads, head_dim, block_tokens): groups of 1 to 5, 8 and 20
    "g1-d64-b32": (2, 2, 64, 32),
    "g3-d16-b16": (3, 1, 16, 16),
    "g4-d80-b128": (8, 2, 80, 128),
    "g5-d64-b16": (5, 1, 64, 16),
    "g8-d128-b32": (8, 1, 128, 32),
    "g3-d64-b128": (9, 3, 64, 128),
    "g2-d256-b32": (4, 2, 256, 32),
    "g20-d48-b16": (20, 1, 48, 16),
}


@pytest.fixture(params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def geometry(request: pytest.FixtureRequest) -> dict[str, Any]:
    names = ("num_q_heads", "num_kv_heads", "head_dim", "block_tokens")
    return dict(zip(names, request.param, strict=True))


def skip_if(excuses: list[str]) -> None:
    if excuses:
        pytest.skip("near a tie, page order not compared: " + "; ".join(excuses))


def test_every_instruction_set_of_the_machine_is_supported() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    by_flags = {
        "amx_bf16": {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"} <= flags,
        "avx512_bf16": {"avx512f", "avx512_bf16"} <= flags,
        "avx512_vnni": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= flags,
        "avx512": {"avx512f", "avx512bw", "avx512vl"} <= flags,
        "avx2": {"avx2", "fma", "f16c"} <= flags,
        "scalar": True,
    }
    expected = [name for name in ISAS if by_flags.get(name)]
    found = supported_isas()
    if by_flags["avx512_bf16"] and found.index("avx512_vnni") < found.index("avx512_bf16"):  # slow dot products
        slow = expected.index("avx512_bf16")
        expected[slow : slow + 2] = reversed(expected[slow : slow + 2])
    assert found == expected


def test_auto_takes_the_best_instruction_set() -> None:
    assert ServedLayer(Shape(isa="auto"), num_blocks=1).attention.isa == supported_isas()[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_then_decode_is_exact_on_every_instruction_set(
    isa: str, dtype: torch.dtype, geometry: dict[str, Any]
) -> None:
    layer = ServedLayer(Shape(dtype=dtype, isa=isa, scale=geometry["head_dim"] ** -0.5, **geometry), num_blocks=64)
    assert layer.attention.isa == isa
    block = geometry["block_tokens"]
    lengths = [1, 15, 16, 17, block, block + 1, 2 * block + 9]
    rows = [(layer.start(), length) for length in lengths]
    check_step(layer, layer.step(rows, retained=RETAINED, decode=False))
    check_step(layer, layer.step([(request, 1) for request, _ in rows], retained=RETAINED))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
def test_selected_pages_and_their_attention_on_every_instruction_set(
    isa: str, dtype: torch.dtype, geometry: dict[str, Any], summary: str
) -> None:
    shape = Shape(dtype=dtype, isa=isa, summary=summary, scale=geometry["head_dim"] ** -0.5, **geometry)
    layer = ServedLayer(shape, num_blocks=64)
    assert layer.attention.isa == isa
    rows = [(layer.start(), length) for length in (300, 47, 190)]
    layer.step(rows)
    skip_if(check_step(layer, layer.step([(request, 1) for request, _ in rows], selection=TOPK, retained=RETAINED)))


@pytest.mark.parametrize("seq_len", [63, 64, 79, 80, 81, 95, 96, 400])
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("selection", [DENSE, TOPK], ids=["dense", "topk"])
def test_no_candidate_one_candidate_and_many(seq_len: int, block_tokens: int, selection: SelectionSpec) -> None:
    layer = ServedLayer(Shape(block_tokens=block_tokens), num_blocks=32)
    request = layer.start()
    layer.step([(request, seq_len - 1)])
    step = layer.step([(request, 1)], selection=selection, retained=RETAINED)
    skip_if(check_step(layer, step))
    candidates = max(0, (seq_len - 32) // 16 - 1)
    wanted = candidates if selection is DENSE else min(3, candidates)
    assert [len(layer.attention.last_plan(0, kv_head)) for kv_head in range(2)] == [wanted, wanted]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [[1, 1, 1], [15, 1, 1, 16], [16, 17, 33], [5, 128, 1, 31], [129, 40], [97, 96, 95]])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunked_prefill_equals_the_whole(dtype: torch.dtype, chunks: list[int], num_threads: int) -> None:
    layer = ServedLayer(Shape(dtype=dtype, num_threads=num_threads, num_q_heads=6), num_blocks=32)
    request = layer.start()
    for chunk in chunks:
        check_step(layer, layer.step([(request, chunk)], decode=False))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_prefill_is_exact_where_rows_are_split_over_threads(num_threads: int, dtype: torch.dtype) -> None:
    layer = ServedLayer(Shape(dtype=dtype, num_threads=num_threads, num_q_heads=1, num_kv_heads=1), num_blocks=100)
    request = layer.start()
    layer.step([(request, 2500)])
    check_step(layer, layer.step([(request, 130)]))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "selection",
    [DENSE, TOPK, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)],
    ids=["dense", "topk", "progressive"],
)
def test_a_mixed_batch(num_threads: int, selection: SelectionSpec) -> None:
    layer = ServedLayer(Shape(num_threads=num_threads, num_q_heads=6), num_blocks=128)
    decoding = [layer.start() for _ in range(4)]
    layer.step(list(zip(decoding, [500, 17, 90, 333], strict=True)))
    prefilling = [layer.start() for _ in range(3)]
    layer.step([(prefilling[0], 70)])
    rows = [
        (decoding[0], 1),
        (prefilling[0], 35),
        (decoding[1], 1),
        (decoding[2], 1),
        (prefilling[1], 100),
        (prefilling[2], 2),
        (decoding[3], 1),
    ]
    for _ in range(2):
        skip_if(check_step(layer, layer.step(rows, selection=selection, retained=RETAINED)))


def test_a_single_row_that_does_not_decode_is_exact() -> None:
    layer = ServedLayer(Shape(), num_blocks=32)
    request = layer.start()
    layer.step([(request, 399)])
    step = layer.step([(request, 1)], selection=TOPK, retained=RETAINED, decode=False)
    assert step.decode_mask == [False]
    check_step(layer, step)


def test_a_request_without_rows_is_passed_over() -> None:
    layer = ServedLayer(Shape(), num_blocks=32)
    first, idle, last = (layer.start() for _ in range(3))
    layer.step([(first, 200), (idle, 100), (last, 150)])
    skip_if(check_step(layer, layer.step([(first, 1), (idle, 0), (last, 1)], selection=TOPK, retained=RETAINED)))


def test_no_requests_at_all() -> None:
    layer = ServedLayer(Shape(), num_blocks=1)
    assert layer.step([]).output.shape == (0, 4, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0883883, 0.41, 1.0])
def test_the_scale_is_not_rounded_to_the_dtype(isa: str, dtype: torch.dtype, scale: float) -> None:
    layer = ServedLayer(Shape(dtype=dtype, isa=isa, scale=scale, head_dim=128), num_blocks=16)
    request = layer.start()
    layer.step([(request, 200)], sharpness=0.3)
    check_step(layer, layer.step([(request, 40)], sharpness=0.3))
    skip_if(check_step(layer, layer.step([(request, 1)], selection=TOPK, retained=RETAINED, sharpness=0.3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_very_peaked_attention_does_not_overflow(isa: str, dtype: torch.dtype) -> None:
    layer = ServedLayer(Shape(dtype=dtype, isa=isa, scale=1.0), num_blocks=16)
    request = layer.start()
    layer.step([(request, 300)])
    for selection in (DENSE, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)):
        step = layer.step([(request, 1)], selection=selection, retained=RETAINED, sharpness=30.0)
        assert step.output.isfinite().all()
        skip_if(check_step(layer, step))


@pytest.mark.parametrize("selection", [DENSE, TOPK, SelectionSpec(ranked=True, threshold=0.9)], ids=str)
def test_two_threads_give_what_one_gives(selection: SelectionSpec) -> None:
    outputs, plans = [], []
    for num_threads in (1, 2):
        layer = ServedLayer(Shape(num_threads=num_threads, num_kv_heads=1), num_blocks=140)
        request = layer.start()
        layer.step([(request, 4200)])
        step = layer.step([(request, 1)], selection=selection, retained=RETAINED)
        outputs.append(step.output)
        plans.append(layer.attention.last_plan(0, 0))
    assert plans[0] == plans[1]
    assert_close(outputs[1], outputs[0])
