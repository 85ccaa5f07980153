"""The CPU kernel's HGCA against its reference: what is salient, the moving averages and the output, step by step."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.kernels.hgca_checks import MirroredLayer
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.hgca.native import begin_row, end_row, reevaluate
from vllm_hybrid_sparse.kernels.latest_rows import LatestRows
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
SALIENCE = SalienceSpec(beta=1.2, alpha=0.25)
EVERYTHING = SalienceSpec(beta=1e-30)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def small(**changes: Any) -> Shape:
    return Shape(**({"num_q_heads": 6, "head_dim": 32, "block_tokens": 16, "summary": "none"} | changes))


def salient(mirror: MirroredLayer, request: Request, kv_head: int = 0) -> list[int]:
    assert mirror.layer.hgca is not None
    return list(mirror.layer.hgca.salient(request.slot, kv_head))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_requests_at_every_stage_on_every_instruction_set(
    isa: str, dtype: torch.dtype, geometry: dict[str, Any]
) -> None:
    shape = Shape(dtype=dtype, isa=isa, summary="none", scale=geometry["head_dim"] ** -0.5, **geometry)
    mirror = MirroredLayer(shape, SALIENCE, RETAINED, num_blocks=80)
    assert mirror.layer.attention.isa == isa
    # No window yet, a window that is exactly full, one page beyond it, and far beyond.
    rows = [(mirror.start(), length) for length in (7, 48, 64, 203)]
    mirror.step(*rows)
    for _ in range(20):
        mirror.step(*((request, 1) for request, _ in rows))
    host_tokens = [RETAINED.candidate_range(len(request.key)) for request, _ in rows]
    assert [len(range(*pages)) for pages in host_tokens] == [0, 1, 2, 10]
    heads = [salient(mirror, rows[3][0], kv_head) for kv_head in range(shape.num_kv_heads)]
    assert all(0 < len(packed) < 160 for packed in heads)
    assert min(map(min, heads)) < 160 <= max(map(max, heads))  # judged by the prompt's rows; by an average, on eviction


def test_a_request_that_grows_token_by_token_from_its_first() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request = mirror.start()
    sizes = []
    for _ in range(150):
        mirror.step((request, 1))
        sizes.append(len(salient(mirror, request)))
    assert sizes[62] == 0  # 63 tokens: sink, window, and a page that has not yet left it
    assert all(later >= earlier for earlier, later in pairwise(sizes))
    assert sizes[-1] > 0


@pytest.mark.parametrize("retained", [RetainedSet(sink_tokens=0, window_tokens=16), RetainedSet(window_tokens=144)])
def test_other_windows(retained: RetainedSet) -> None:
    mirror = MirroredLayer(small(), SALIENCE, retained)
    requests = [mirror.start() for _ in range(3)]
    mirror.step(*zip(requests, (15, 100, 300), strict=True))
    for _ in range(36):
        mirror.step(*((request, 1) for request in requests))
    assert salient(mirror, requests[2])


def test_every_appended_turn_is_judged_anew() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request = mirror.start()
    mirror.step((request, 250))
    before = salient(mirror, request)
    for turn in (5, 1, 40, 16, 97):
        mirror.step((request, turn), decode=False)
        after = salient(mirror, request)
        assert after != before
        assert set(before) - set(after)  # no longer salient
        assert set(after) - set(before)  # reinstated, or new
        for _ in range(18):
            mirror.step((request, 1))
        before = salient(mirror, request)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_everything_salient_it_is_dense_attention(isa: str, dtype: torch.dtype) -> None:
    mirror = MirroredLayer(small(dtype=dtype, isa=isa), EVERYTHING, RETAINED)
    request = mirror.start()
    mirror.step((request, 180))
    for _ in range(20):
        step = mirror.step((request, 1))
        assert_close(step.output, causal_attention(step.query, request.key, request.value, mirror.layer.shape.scale))
    assert salient(mirror, request) == list(range(16, 160))


def test_with_nothing_salient_it_is_the_window_alone() -> None:
    mirror = MirroredLayer(small(), SalienceSpec(beta=1e9), RETAINED)
    request = mirror.start()
    mirror.step((request, 200))
    step = mirror.step((request, 1))
    window = [*range(16), *range(160, 201)]
    key, value = request.key[window], request.value[window]
    assert_close(step.output, causal_attention(step.query, key, value, mirror.layer.shape.scale))
    assert mirror.layer.hgca is not None
    assert mirror.layer.hgca.packed_bytes == 0


@pytest.mark.parametrize("chunks", [(64, 130), (100, 90, 4), (193, 1), (1, 193), (48, 48, 48, 50)])
def test_chunks_of_a_prompt_leave_the_state_of_the_whole(chunks: tuple[int, ...]) -> None:
    mirrors = [MirroredLayer(small(), SALIENCE, RETAINED) for _ in range(2)]
    requests = [mirror.start() for mirror in mirrors]
    prompt = torch.randn(194, 10, 32)
    for mirror, request, parts in zip(mirrors, requests, (chunks, (194,)), strict=True):
        first = 0
        for part in parts:
            mirror.step((request, part), decode=False, tokens=prompt[first : first + part])
            first += part
    assert salient(mirrors[0], requests[0]) == salient(mirrors[1], requests[1])
    token = torch.randn(1, 10, 32)
    outputs = [
        mirror.step((request, 1), tokens=token).output for mirror, request in zip(mirrors, requests, strict=True)
    ]
    assert_close(outputs[0], outputs[1])


def test_a_request_answers_alone_as_it_does_among_others() -> None:
    prompt, answer = torch.randn(230, 10, 32), torch.randn(30, 10, 32)

    def serve(others: bool) -> list[torch.Tensor]:
        mirror = MirroredLayer(small(), SALIENCE, RETAINED, num_blocks=100)
        crowd = [(mirror.start(), length) for length in (90, 300)] if others else []
        request = mirror.start()
        if others:
            mirror.step(*crowd)
        mirror.step((request, 230), tokens=prompt)
        outputs = []
        for token in answer.split(1):
            rows = [(request, 1), *((other, 1) for other, _ in crowd)]
            rest = torch.randn(len(crowd), 10, 32)
            outputs.append(mirror.step(*rows, tokens=torch.cat((token, rest))).output[0])
        return outputs

    for alone, among in zip(serve(False), serve(True), strict=True):
        assert torch.equal(alone, among)


def test_requests_that_share_their_first_blocks_have_states_of_their_own() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    first = mirror.start()
    mirror.step((first, 208))
    second = mirror.start()  # as with a prefix cache: 192 tokens are there, the rest is its own
    second.key, second.value, second.blocks = first.key[:192], first.value[:192], first.blocks[:12]
    mirror.step((first, 1), (second, 30))
    assert salient(mirror, first) != salient(mirror, second)
    for _ in range(20):
        mirror.step((second, 1), (first, 1))


def test_a_request_whose_state_is_missing_attends_to_everything_and_has_one_again() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request = mirror.start()
    mirror.step((request, 200))
    mirror.step((request, 1))
    assert mirror.layer.hgca is not None
    mirror.layer.hgca.release(request.slot)
    mirror.tokens[request.slot] = 0
    step = mirror.step((request, 1))
    assert_close(step.output, causal_attention(step.query, request.key, request.value, mirror.layer.shape.scale))
    assert salient(mirror, request)
    mirror.step((request, 1))


def test_a_request_without_a_slot_is_exact() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request = mirror.layer.start()
    for length in (200, 1):
        step = mirror.layer.step([(request, length)])
    assert request.slot == -1
    assert_close(step.output, causal_attention(step.query, request.key, request.value, mirror.layer.shape.scale))


def test_a_request_without_rows_keeps_its_state() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    first, idle = mirror.start(), mirror.start()
    mirror.step((first, 150), (idle, 170))
    packed = salient(mirror, idle)
    mirror.step((first, 1), (idle, 0))
    assert salient(mirror, idle) == packed
    mirror.step((idle, 1), (first, 0))


def test_a_released_slot_begins_again_with_nothing() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    assert mirror.layer.hgca is not None
    for length in (300, 20, 130):
        request = mirror.start()
        assert request.slot == 0
        mirror.step((request, length))
        for _ in range(18):
            mirror.step((request, 1))
        mirror.release(request)
        assert mirror.layer.hgca.packed_bytes == 0
        assert mirror.layer.hgca.salient(0, 0) == []


def test_packed_bytes_are_whole_pages_and_no_more_than_twice_what_is_packed() -> None:
    mirror = MirroredLayer(small(num_kv_heads=1), SALIENCE, RETAINED)
    assert mirror.layer.hgca is not None
    request, page_bytes = mirror.start(), mirror.layer.attention.layout.page_bytes
    for length in (600, 1, 1, 60, 4):
        mirror.step((request, length))
        pages = -(-len(salient(mirror, request)) // 16)
        held = mirror.layer.hgca.packed_bytes
        assert pages * page_bytes <= held <= 2 * pages * page_bytes
        assert held % page_bytes == 0


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_two_threads_give_what_one_gives(num_kv_heads: int) -> None:
    outputs, chosen = [], []
    for num_threads in (1, 2):
        mirror = MirroredLayer(
            small(num_threads=num_threads, num_q_heads=2, num_kv_heads=num_kv_heads), SALIENCE, RETAINED, num_blocks=160
        )
        request = mirror.start()
        mirror.step((request, 2300))
        outputs.append(torch.cat([mirror.step((request, 1)).output for _ in range(20)]))
        chosen.append(salient(mirror, request))
    assert chosen[0] == chosen[1]
    assert_close(outputs[1], outputs[0])


def test_very_peaked_attention_does_not_overflow(isa: str) -> None:
    layer = MirroredLayer(small(isa=isa, scale=1.0), SALIENCE, RETAINED).layer
    assert layer.hgca is not None
    request = layer.start()
    request.slot = 0
    for length in (300, 40, *([1] * 17)):
        assert layer.step([(request, length)], sharpness=30.0).output.isfinite().all()
        averages = torch.tensor(layer.hgca.averages(0, 0))
        assert averages.isfinite().all()
        assert averages.view(3, -1).sum(1).max() <= 1 + 1e-5


def test_what_was_read_is_counted() -> None:
    mirror = MirroredLayer(small(num_kv_heads=1), SALIENCE, RETAINED)
    request = mirror.start()
    mirror.step((request, 300))
    mirror.layer.attention.reset_stats()
    mirror.step((request, 1))
    stats = mirror.layer.attention.stats()
    assert stats.pages_total == 19
    assert stats.pages_candidate == 15  # tokens 16 to 255
    assert stats.pages_read == 4 + -(-len(salient(mirror, request)) // 16)
    assert stats.summaries_scored == 0


def test_a_layer_with_state_needs_slots() -> None:
    plain = ServedLayer(Shape(), num_blocks=2)
    state = plain.attention.hgca_layer(SALIENCE, RETAINED)
    batch = plain.batch([], [], [], [])
    nothing = torch.zeros(0, 4, 64)
    with pytest.raises(KernelError, match="slots=None"):
        plain.attention.forward(nothing, None, None, plain.kv_cache, batch, SelectionSpec(), RETAINED, nothing, state)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(10, dtype=torch.int64),
        torch.zeros(20, dtype=torch.int32)[::2],
        torch.zeros(1, 10, dtype=torch.int32),
        torch.zeros(10, dtype=torch.int32, device="meta"),
    ],
)
def test_a_row_begins_with_a_block_table_that_can_be_read(wrong: torch.Tensor) -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request, layer = mirror.start(), mirror.layer
    mirror.step((request, 150))
    assert layer.hgca is not None
    with pytest.raises(
        KernelError, match=r"^block_table=\[.*\] int\d\d on \w+, strides .* must be \[any\] int32 on cpu"
    ):
        begin_row(layer.attention, layer.hgca, layer.kv_cache, wrong, request.slot, 151)


@pytest.mark.parametrize(
    ("name", "wrong", "shape"),
    [
        ("scores", torch.zeros(6, 64, dtype=torch.float64), r"\[6, any\]"),
        ("scores", torch.zeros(5, 64), r"\[6, any\]"),
        ("scores", torch.zeros(6, 128)[:, ::2], r"\[6, any\]"),
        ("lse", torch.zeros(12)[::2], r"\[6\]"),
        ("lse", torch.zeros(6, device="meta"), r"\[6\]"),
    ],
)
def test_a_row_ends_with_scores_that_can_be_read(name: str, wrong: torch.Tensor, shape: str) -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request, layer = mirror.start(), mirror.layer
    mirror.step((request, 150))
    assert layer.hgca is not None
    given = {"scores": torch.zeros(6, 64), "lse": torch.zeros(6)} | {name: wrong}
    rule = rf"{name}=\[.*\] \w+ on \w+, strides \[.*\]: must be {shape} float32 on cpu, .*contiguous"
    with pytest.raises(KernelError, match=f"^{rule}$"):
        end_row(layer.attention, layer.hgca, request.slot, 151, **given)


def test_rows_behind_the_end_of_their_table_are_not_judged_by() -> None:
    mirror = MirroredLayer(small(), SALIENCE, RETAINED)
    request, layer = mirror.start(), mirror.layer
    mirror.step((request, 150))
    assert layer.hgca is not None
    table = torch.tensor(request.blocks[:2], dtype=torch.int32)
    appended = [LatestRows(request.slot, torch.zeros(6, 6, 32), 150, table)]
    with pytest.raises(KernelError, match=r"^seq_lens=150: the block table names 2 blocks of 16 tokens$"):
        reevaluate(layer.attention, layer.hgca, layer.kv_cache, appended)
