"""The CPU kernel's Fluxion against its reference: features, budgets, pages and output, step by step."""

import math
from typing import Any

import pytest
import torch

from tests.kernels.fluxion_checks import TAU, MirroredFluxion, constant_predictor, some_predictor
from tests.kernels.served_layer import ServedLayer, Shape
from tests.tolerances import assert_close
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.fluxion.native import choose_pages, fluxion_layer, native_predictor
from vllm_hybrid_sparse.kernels.fluxion.reference import ANCHOR_ROWS, weigh_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import native_selection
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch, stored_batch
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.predictor.features import DECODE_FEATURES, FEATURES, observe_anchor
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.values import SPLIT_HEAD_DIM, RetainedSet, SalienceSpec, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
RANKINGS = [("minmax", 2), ("key_codes", 1), ("key_codes", 2), ("split_codes", 2)]  # summary, code bits
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def small(**changes: Any) -> Shape:
    return Shape(**({"num_q_heads": 6, "head_dim": 32, "block_tokens": 16, "scale": 32**-0.5} | changes))


def _dtypes_and_summaries() -> list[Any]:
    """Each dtype with each summary. All but one summary of each dtype are marked slow."""
    often = {
        torch.bfloat16: "key_codes",
        torch.float16: "minmax",
        torch.float32: "split_codes",
        torch.float8_e4m3fn: "split_codes",
    }
    return [
        pytest.param(
            dtype, summary, marks=[] if often[dtype] == summary else [pytest.mark.slow], id=f"{dtype}-{summary}"
        )
        for dtype in DTYPES
        for summary in ("minmax", "key_codes", "split_codes")
    ]


@pytest.mark.parametrize(("dtype", "summary"), _dtypes_and_summaries())
def test_requests_of_every_length_in_one_batch_on_every_instruction_set(
    isa: str, dtype: torch.dtype, geometry: dict[str, Any], summary: str
) -> None:
    if summary == "split_codes":
        geometry["head_dim"] = math.ceil(geometry["head_dim"] / SPLIT_HEAD_DIM) * SPLIT_HEAD_DIM
    shape = Shape(dtype=dtype, isa=isa, scale=geometry["head_dim"] ** -0.5, summary=summary, **geometry)
    mirror = MirroredFluxion(shape, some_predictor(shape, RETAINED), RETAINED, num_blocks=80)
    assert mirror.layer.attention.isa == isa
    # No window yet, a window that is exactly full, one page beyond it, and far beyond.
    rows = [(mirror.start(), length) for length in (7, 48, 64, 203, 700)]
    mirror.step(*rows)
    granularities, read, candidates = set[int](), 0, 0
    for _ in range(20):
        mirror.step(*((request, 1) for request, _ in rows))
        for step in filter(None, mirror.steps):
            granularities |= set(step.budgets.granularity.tolist())
        read += sum(len(pages) for pages_of in mirror.pages for pages in pages_of)
        candidates += sum(len(range(*RETAINED.candidate_range(len(r.key)))) for r, _ in rows) * shape.num_kv_heads
    assert 0 < read < candidates
    assert len(granularities) > 1
    assert len(mirror.excuses) <= 3, mirror.excuses
    assert len(mirror.anchors_on_a_limit) <= (1 if dtype == torch.float32 else 4)


@pytest.mark.parametrize(("summary", "code_bits"), RANKINGS)
@pytest.mark.parametrize("granularity", [16, 32, 64, 128])
def test_a_granularity_that_is_asked_for_is_kept(isa: str, granularity: int, summary: str, code_bits: int) -> None:
    shape = small(isa=isa, summary=summary, code_bits=code_bits)
    mirror = MirroredFluxion(shape, some_predictor(shape, RETAINED, seed=1), RETAINED, granularity=granularity)
    request = mirror.start()
    mirror.step((request, 333))
    seen = set[int]()
    for _ in range(20):
        mirror.step((request, 1))
        assert mirror.steps[0] is not None
        seen |= set(mirror.steps[0].budgets.granularity.tolist())
    assert granularity in seen <= {0, granularity}
    assert not mirror.excuses


@pytest.mark.parametrize("granularity", [0, 16, 64])
@pytest.mark.parametrize(("threads", "share"), [(1, 0.5), (2, 1.0)])
@pytest.mark.parametrize("summary", ["key_codes", "split_codes"])
def test_unread_weight_goes_to_the_candidates_read(
    isa: str, granularity: int, threads: int, share: float, summary: str
) -> None:
    """This holds for heads that select some blocks. If all blocks are read, or none, nothing is given."""
    shape = small(isa=isa, summary=summary, num_threads=threads)
    for predictor in (some_predictor(shape, RETAINED), constant_predictor(1.0), constant_predictor(1.0, streams=True)):
        mirror = MirroredFluxion(shape, predictor, RETAINED, granularity=granularity, attributed=share)
        rows = [(mirror.start(), length) for length in (30, 333)]
        mirror.step(*rows)
        for _ in range(6):
            mirror.step(*((request, 1) for request, _ in rows))
        assert len(mirror.excuses) <= 2, mirror.excuses


def test_a_request_that_grows_token_by_token_from_its_first() -> None:
    mirror = MirroredFluxion(small(), some_predictor(small(), RETAINED), RETAINED)
    request = mirror.start()
    for _ in range(150):
        mirror.step((request, 1))
    assert any(mirror.pages[0])
    assert len(mirror.excuses) <= 3, mirror.excuses


def test_a_short_request_attends_to_everything_until_it_has_grown() -> None:
    """The last row that attends to everything becomes the anchor of the first row that chooses."""
    mirror = MirroredFluxion(small(), constant_predictor(0.1), RETAINED, granularity=16, dense_tokens=120)
    request, longer = mirror.start(), mirror.start()
    mirror.step((request, 110), (longer, 121))
    for tokens in range(111, 131):
        step = mirror.step((request, 1), (longer, 1))
        assert (mirror.steps[0] is None) == (tokens <= 120)
        assert mirror.steps[1] is not None
        exact = causal_attention(step.query[:1], request.key, request.value, mirror.layer.shape.scale)
        assert torch.allclose(step.output[:1].double(), exact, atol=1e-4) == (tokens <= 120)
    assert mirror.layer.fluxion is not None
    assert mirror.layer.fluxion.anchor_tokens(request.slot) == 120
    assert not mirror.excuses


@pytest.mark.parametrize("retained", [RetainedSet(sink_tokens=0, window_tokens=16), RetainedSet(window_tokens=144)])
def test_other_windows(retained: RetainedSet) -> None:
    mirror = MirroredFluxion(small(), some_predictor(small(), retained), retained)
    requests = [mirror.start() for _ in range(3)]
    mirror.step(*zip(requests, (15, 100, 300), strict=True))
    for _ in range(36):
        mirror.step(*((request, 1) for request in requests))
    assert any(mirror.pages[-1])
    assert len(mirror.excuses) <= 3, mirror.excuses


def test_an_appended_turn_and_an_anchor_that_has_served_are_followed_by_a_new_anchor() -> None:
    mirror = MirroredFluxion(small(num_q_heads=2), some_predictor(small(num_q_heads=2), RETAINED), RETAINED)
    request = mirror.start()
    mirror.step((request, 100))
    assert mirror.layer.fluxion is not None
    anchors = list[int]()
    for turn in (5, 1, 40):
        mirror.step((request, turn), decode=False)
        before = len(request.key)
        mirror.step((request, 1))
        anchors.append(mirror.layer.fluxion.anchor_tokens(request.slot))
        assert anchors[-1] == before
    for _ in range(ANCHOR_ROWS):
        mirror.step((request, 1))
        anchors.append(mirror.layer.fluxion.anchor_tokens(request.slot))
    assert anchors[2:-1] == [before] * ANCHOR_ROWS
    assert anchors[-1] == before + ANCHOR_ROWS + 1


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_everything_selected_it_is_dense_attention(isa: str, dtype: torch.dtype, threads: int) -> None:
    mirror = MirroredFluxion(small(dtype=dtype, isa=isa, num_threads=threads), constant_predictor(1.0), RETAINED)
    request = mirror.start()
    mirror.step((request, 180))
    for _ in range(20):
        step = mirror.step((request, 1))
        assert_close(step.output, causal_attention(step.query, request.key, request.value, mirror.layer.shape.scale))
        assert mirror.pages == [[list(range(*RETAINED.candidate_range(len(request.key))))] * 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_with_all_heads_streaming_it_is_the_retained_set_alone(isa: str, threads: int) -> None:
    shape = small(isa=isa, num_threads=threads)
    mirror = MirroredFluxion(shape, constant_predictor(1.0, streams=True), RETAINED)
    requests = [mirror.start(), mirror.start()]
    mirror.step((requests[0], 200), (requests[1], 10))
    step = mirror.step(*((request, 1) for request in requests))
    request = requests[0]
    window = [*range(16), *range(160, 201)]
    key, value = request.key[window], request.value[window]
    assert_close(step.output[:1], causal_attention(step.query[:1], key, value, shape.scale))
    stats = mirror.layer.attention.stats()
    assert (stats.streaming, stats.summaries_scored) == (2, 0)
    assert stats.pages_read == 2 * (1 + 3 + 1)  # two KV heads: sink, window; the short request's page
    assert stats.pages_total == 2 * (13 + 1)


def test_what_was_read_is_counted() -> None:
    mirror = MirroredFluxion(small(), constant_predictor(0.25), RETAINED, granularity=16)
    request = mirror.start()
    mirror.step((request, 16 * 23))
    mirror.layer.attention.reset_stats()
    mirror.step((request, 1))
    stats = mirror.layer.attention.stats()
    selected = sum(len(pages) for pages in mirror.pages[0])
    assert stats.pages_candidate == stats.summaries_scored == 2 * 20
    assert 2 * 5 < selected < 2 * 3 * 5  # a quarter for each of three heads, which share some
    assert stats.pages_read == 2 * 4 + selected
    assert stats.anchor_pages == 2 * (23 + 1 + 20)  # all for the segments, then sink and candidates for the moments
    mirror.step((request, 1))
    assert mirror.layer.attention.stats().anchor_pages == stats.anchor_pages


@pytest.mark.parametrize("summary", ["minmax", "split_codes"])
def test_threads_do_not_change_what_is_read(summary: str) -> None:
    """One thread matches the reference, and several threads match the one."""
    outputs, plans = list[torch.Tensor](), list[list[list[int]]]()
    for threads in (1, 2, 5):
        shape = small(num_threads=threads, summary=summary)
        mirror = MirroredFluxion(shape, some_predictor(shape, RETAINED), RETAINED, num_blocks=360)
        layer, requests = mirror.layer, [mirror.start(), mirror.start()]
        compared = mirror.step if threads == 1 else lambda *rows, layer=layer: layer.step(rows, retained=RETAINED)
        compared((requests[0], 60))
        for _ in range(10):
            compared((requests[1], 480))  # 4800 tokens, scored in two parts
        outputs.append(compared(*((request, 1) for request in requests)).output)
        plans.append([layer.attention.last_plan(row, kv_head) for row in range(2) for kv_head in range(2)])
    assert any(plans[0])
    assert plans[0] == plans[1] == plans[2]
    assert_close(outputs[1], outputs[0])
    assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_released_slot_forgets_and_a_resumed_request_observes_anew(dtype: torch.dtype) -> None:
    mirror = MirroredFluxion(small(dtype=dtype), some_predictor(small(dtype=dtype), RETAINED), RETAINED)
    states = mirror.layer.fluxion
    assert states is not None
    tokens = torch.randn(231, 10, 32)
    first = mirror.start()
    mirror.step((first, 200), tokens=tokens[:200])
    assert states.anchor(first.slot) == []
    for t in range(200, 230):
        mirror.step((first, 1), tokens=tokens[t : t + 1])
    assert len(states.anchor(first.slot)) == 6 * len(FEATURES)
    mirror.release(first)
    assert states.anchor(first.slot) == []
    states.release(99)  # this slot has no state

    resumed = mirror.start()
    mirror.step((resumed, 230), tokens=tokens[:230])
    fresh = MirroredFluxion(small(dtype=dtype), some_predictor(small(dtype=dtype), RETAINED), RETAINED)
    new = fresh.start()
    fresh.step((new, 230), tokens=tokens[:230])
    again, expected = (
        layer.step((request, 1), tokens=tokens[230:]).output for layer, request in ((mirror, resumed), (fresh, new))
    )
    assert torch.equal(again, expected)


def test_a_row_without_a_slot_attends_to_everything() -> None:
    mirror = MirroredFluxion(small(), constant_predictor(0.0, streams=True), RETAINED)
    request = mirror.layer.start()
    mirror.layer.step([(request, 300)], retained=RETAINED)
    step = mirror.layer.step([(request, 1)], retained=RETAINED)
    assert_close(step.output, causal_attention(step.query, request.key, request.value, mirror.layer.shape.scale))


@pytest.mark.parametrize("summary", ["minmax", "key_codes", "split_codes"])
@pytest.mark.parametrize("sharpness", [0.05, 1.0, 8.0])
def test_the_anchor_is_what_python_observes(isa: str, sharpness: float, summary: str) -> None:
    shape = small(isa=isa, summary=summary)
    mirror = MirroredFluxion(shape, some_predictor(shape, RETAINED), RETAINED, num_blocks=80)
    request = mirror.start()
    prompt = mirror.step((request, 1000), sharpness=sharpness, key_offset=0.3)
    mirror.step((request, 1))
    assert mirror.layer.fluxion is not None
    features = torch.tensor(mirror.layer.fluxion.anchor(request.slot)).reshape(6, len(FEATURES))
    keys, values = (part[:1000].transpose(0, 1).double() for part in (request.key, request.value))
    query = prompt.query[-1].double()
    weights = weigh_pages(query, keys, mirror.sequences[request.slot]) if summary != "minmax" else None
    anchor = observe_anchor(query, keys, values, small().scale, 3, RETAINED, TAU, weights)
    columns = [column for column, name in enumerate(FEATURES) if name not in DECODE_FEATURES]
    torch.testing.assert_close(features[:, columns].double(), anchor.features[:, columns], rtol=1e-4, atol=1e-5)
    budgets = features[:, [FEATURES.index(f"anchor_budget_{blk}") for blk in (16, 32, 64, 128)]]
    if sharpness == 8.0:
        assert 0 < budgets.mean() < 1


def test_columns_are_those_of_the_features() -> None:
    assert tuple(_native.features()) == FEATURES


def test_what_does_not_fit_is_refused() -> None:
    native = native_predictor(Predictor())
    with pytest.raises(KernelError, match="granularity=48: must be 0 or one of 16, 32, 64, 128"):
        fluxion_layer(native, layer=0, tau=0.1, granularity=48)
    with pytest.raises(KernelError, match=r"^layer=-1: must be 0 or more$"):
        fluxion_layer(native, layer=-1, tau=0.1)
    with pytest.raises(KernelError, match=r"^tau=0\.0: must be above 0$"):
        fluxion_layer(native, layer=0, tau=0.0)
    with pytest.raises(KernelError, match="dense_tokens=-1: must be 0 or more"):
        fluxion_layer(native, layer=0, tau=0.1, dense_tokens=-1)
    other = Predictor()
    other.outputs = torch.nn.Linear(64, 3)
    with pytest.raises(KernelError, match="predictor="):
        native_predictor(other)
    layer = ServedLayer(small(summary="cuboid_mean"), num_blocks=4, fluxion=fluxion_layer(native, layer=0, tau=0.1))
    with pytest.raises(KernelError, match=r"^summary=cuboid_mean: fluxion needs key_codes, split_codes or minmax$"):
        layer.step([(layer.start(), 4)])
    both = ServedLayer(
        small(),
        num_blocks=4,
        salience=SalienceSpec(),
        retained=RETAINED,
        fluxion=fluxion_layer(native, layer=0, tau=0.1),
    )
    with pytest.raises(KernelError, match=r"^hgca: must be None beside fluxion$"):
        both.step([(both.start(), 4)])


def test_pages_are_not_chosen_without_slots_or_by_other_summaries() -> None:
    part = torch.zeros(1, 6, 32), torch.zeros(1, 6)
    selection = native_selection(SelectionSpec(), RETAINED)
    for summary, slots, rule in (
        ("key_codes", None, "slots=None: must be given where a layer keeps the state of requests"),
        ("cuboid_mean", torch.tensor([0], dtype=torch.int32), "summary=cuboid_mean: fluxion needs key_codes, split"),
    ):
        state = fluxion_layer(native_predictor(Predictor()), layer=0, tau=0.1)
        layer = ServedLayer(small(summary=summary), num_blocks=4, fluxion=state)
        batch = NativeBatch.from_tensors(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([20], dtype=torch.int32),
            torch.tensor([[0, 1]], dtype=torch.int32),
            torch.tensor([-1]),
            torch.tensor([True]),
            slots,
        )
        with pytest.raises(KernelError, match=f"^{rule}"):
            choose_pages(layer.attention, state, selection, layer.kv_cache, torch.zeros(1, 6, 32), batch, part, part)


def test_a_row_that_is_longer_than_its_table_is_refused() -> None:
    mirror = MirroredFluxion(small(), constant_predictor(0.1), RETAINED, granularity=16)
    request, layer = mirror.start(), mirror.layer
    mirror.step((request, 300))
    assert layer.fluxion is not None
    table = torch.tensor(request.blocks[:2], dtype=torch.int32)
    batch = stored_batch([1], [300], [table], [request.slot], decode=True)
    part = torch.zeros(1, 6, 32), torch.zeros(1, 6)
    with pytest.raises(KernelError, match="seq_lens=300: the block table names 2 blocks of 16 tokens"):
        choose_pages(
            layer.attention,
            layer.fluxion,
            native_selection(SelectionSpec(), RETAINED),
            layer.kv_cache,
            torch.zeros(1, 6, 32),
            batch,
            part,
            part,
        )
