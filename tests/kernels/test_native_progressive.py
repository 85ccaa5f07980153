"""The CPU kernel reads page for page what the literal Algorithm 1 reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.served_layer import ServedLayer, Shape
from tests.kernels.step_checks import check_step, reference
from vllm_hybrid_sparse.kernels.paged_attention.native import native_selection, supported_isas
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
FLAT, NORMAL, PEAKY = 0.2, 1.0, 5.0


def skip_if(excuses: list[str]) -> None:
    if excuses:
        pytest.skip("near a tie, page order not compared: " + "; ".join(excuses))


def candidates_of(seq_len: int) -> int:
    first_page, end_page = RETAINED.candidate_range(seq_len)
    return end_page - first_page


def decode_once(
    shape: Shape, selection: SelectionSpec, *, sharpness: float, lengths: tuple[int, ...] = (600, 85), seed: int = 0
) -> list[list[int]]:
    """Check one decode step of some requests; returns the plans of the first one, by KV head."""
    layer = ServedLayer(shape, num_blocks=sum(lengths) // shape.block_tokens + 2 * len(lengths), seed=seed)
    rows = [(layer.start(), length - 1) for length in lengths]
    layer.step(rows)
    step = layer.step(
        [(request, 1) for request, _ in rows], selection=selection, retained=RETAINED, sharpness=sharpness
    )
    skip_if(check_step(layer, step))
    return [layer.attention.last_plan(0, kv_head) for kv_head in range(shape.num_kv_heads)]


@pytest.mark.parametrize("sharpness", [FLAT, NORMAL, PEAKY], ids=["flat", "normal", "peaky"])
@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("microbatch_pages", [1, 3, 8])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_pages_read_are_those_of_algorithm_1(
    sharpness: float, threshold: float, microbatch_pages: int, num_threads: int
) -> None:
    selection = SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=microbatch_pages)
    decode_once(Shape(num_threads=num_threads, num_q_heads=6), selection, sharpness=sharpness)


@pytest.mark.parametrize("num_threads", [2, 4])
@pytest.mark.parametrize("lengths", [(2900,), (2900, 1200, 85)], ids=str)
def test_large_microbatches_are_shared_by_the_threads(num_threads: int, lengths: tuple[int, ...]) -> None:
    selection = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=50)
    shape = Shape(num_threads=num_threads, num_q_heads=6)
    plans = decode_once(shape, selection, sharpness=FLAT, lengths=lengths)
    assert all(len(plan) >= 50 for plan in plans)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
def test_every_instruction_set_dtype_and_group(isa: str, dtype: torch.dtype, group: int, summary: str) -> None:
    shape = Shape(isa=isa, dtype=dtype, num_q_heads=group, num_kv_heads=1, summary=summary)
    selection = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)
    decode_once(shape, selection, sharpness=2.0, lengths=(400,), seed=group)


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_block_size_and_head_size(block_tokens: int, head_dim: int) -> None:
    shape = Shape(block_tokens=block_tokens, head_dim=head_dim, scale=head_dim**-0.5)
    decode_once(shape, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2), sharpness=2.0)


@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(1, 500, (5,), generator=generator).tolist())
    sharpness = 10 ** (2 * torch.rand(1, generator=generator).item() - 1)
    threshold = 0.5 + 0.5 * torch.rand(1, generator=generator).item()
    microbatch_pages = int(torch.randint(1, 10, (1,), generator=generator))
    selection = SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=microbatch_pages)
    shape = Shape(num_q_heads=6, num_threads=1 + seed % 2, summary=("minmax", "cuboid_mean")[seed // 2 % 2])
    decode_once(shape, selection, sharpness=sharpness, lengths=lengths, seed=seed)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threshold_one_reads_every_candidate(num_threads: int) -> None:
    plans = decode_once(Shape(num_threads=num_threads), SelectionSpec(ranked=True, threshold=1.0), sharpness=PEAKY)
    for plan in plans:
        assert plan == list(range(*RETAINED.candidate_range(600)))


def test_threshold_one_scores_nothing() -> None:
    layer = ServedLayer(Shape(), num_blocks=20)
    request = layer.start()
    layer.step([(request, 599)])
    layer.attention.reset_stats()
    layer.step([(request, 1)], selection=SelectionSpec(ranked=True, threshold=1.0), retained=RETAINED)
    stats = layer.attention.stats()
    assert stats.pages_read == stats.pages_total == 2 * 38
    assert (stats.summaries_scored, stats.microbatches, stats.judged) == (0, 0, 0)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_lowest_threshold_reads_one_microbatch(num_threads: int) -> None:
    selection = SelectionSpec(ranked=True, threshold=1e-6, microbatch_pages=5)
    assert [len(plan) for plan in decode_once(Shape(num_threads=num_threads), selection, sharpness=NORMAL)] == [5, 5]


def test_a_microbatch_of_more_than_all_candidates() -> None:
    selection = SelectionSpec(ranked=True, threshold=0.5, microbatch_pages=1024)
    plans = decode_once(Shape(), selection, sharpness=NORMAL)
    assert [len(plan) for plan in plans] == [candidates_of(600)] * 2


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 33, 48, 63, 64, 80])
def test_requests_with_no_or_few_candidates(seq_len: int) -> None:
    plans = decode_once(Shape(), SelectionSpec(ranked=True, threshold=0.5), sharpness=NORMAL, lengths=(seq_len,))
    assert [len(plan) for plan in plans] == [candidates_of(seq_len)] * 2


def test_peaked_attention_reads_fewer_pages_than_flat() -> None:
    selection = SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=1)
    flat, peaky = (decode_once(Shape(), selection, sharpness=sharpness) for sharpness in (FLAT, PEAKY))
    assert max(map(len, peaky)) < min(map(len, flat))


@pytest.mark.parametrize("budget", [{"max_pages": 6}, {"budget_ratio": 0.2}], ids=str)
def test_a_threshold_and_a_budget_together_stop_at_the_first(budget: dict[str, float]) -> None:
    spec = SelectionSpec(ranked=True, threshold=0.999999, microbatch_pages=4, **budget)  # type: ignore[arg-type]
    plans = decode_once(Shape(), spec, sharpness=FLAT)
    assert [len(plan) for plan in plans] == [spec.budget_pages(candidates_of(600))] * 2


def test_topk_of_everything_is_dense() -> None:
    plans = decode_once(Shape(), SelectionSpec(ranked=True, budget_ratio=1.0, max_pages=10**6), sharpness=NORMAL)
    for plan in plans:
        assert sorted(plan) == list(range(*RETAINED.candidate_range(600)))


@given(st.floats(0, 1, exclude_min=True), st.one_of(st.none(), st.integers(1, 10_000)), st.integers(0, 100_000))
def test_a_budget_is_the_same_number_in_both_languages(ratio: float, max_pages: int | None, candidates: int) -> None:
    spec = SelectionSpec(ranked=True, budget_ratio=ratio, max_pages=max_pages)
    assert native_selection(spec, RETAINED).budget(candidates) == spec.budget_pages(candidates)


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_ratio_in_percent_rounds_up_exactly_in_both_languages(percent: int) -> None:
    spec = SelectionSpec(ranked=True, budget_ratio=percent / 100)
    native = native_selection(spec, RETAINED)
    for hundreds in range(1, 100):
        assert native.budget(100 * hundreds) == spec.budget_pages(100 * hundreds) == percent * hundreds


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_same_step_gives_the_same_bits_every_time(num_threads: int) -> None:
    layer = ServedLayer(Shape(num_threads=num_threads, dtype=torch.bfloat16, num_q_heads=6), num_blocks=200)
    requests = [layer.start() for _ in range(3)]
    layer.step(list(zip(requests, (2000, 300, 90), strict=True)))
    query = layer.random(3, 6, 64)
    batch = layer.batch(requests, [1, 1, 1], [True] * 3, [-1] * 3)
    outputs, plans = [], []
    for _ in range(30):
        output = torch.full_like(query, torch.nan)
        selection = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)
        layer.attention.forward(query, None, None, layer.kv_cache, batch, selection, RETAINED, output)
        outputs.append(output)
        plans.append([layer.attention.last_plan(index, kv_head) for index in range(3) for kv_head in range(2)])
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("threshold", [0.9, 0.999])
def test_the_counts_are_those_of_the_plans(num_threads: int, threshold: float) -> None:
    layer = ServedLayer(Shape(num_threads=num_threads), num_blocks=60)
    requests = [layer.start() for _ in range(3)]
    layer.step(list(zip(requests, (599, 84, 20), strict=True)))
    layer.attention.reset_stats()
    selection = SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=2)
    step = layer.step([(request, 1) for request in requests], selection=selection, retained=RETAINED)
    stats = layer.attention.stats()
    plans = [layer.attention.last_plan(index, kv_head) for index in range(3) for kv_head in range(2)]
    candidates = [candidates_of(length) for length in (600, 85, 21) for _ in range(2)]
    pages = 2 * (38 + 6 + 2)
    assert (stats.calls, stats.items) == (1, 6)
    assert stats.pages_total == pages
    assert stats.pages_candidate == sum(candidates)
    assert stats.pages_read == pages - sum(candidates) + sum(map(len, plans))
    assert stats.summaries_scored == sum(candidates)
    assert stats.microbatches == sum((len(plan) + 1) // 2 for plan in plans)
    assert stats.judged == sum(n > 0 for n in candidates)
    masses = [
        float(result.mass[-1].min()) for group in reference(layer, step).groups for result in group if result.mass
    ]
    assert len(masses) == stats.judged
    assert stats.kept_mass == pytest.approx(sum(masses), rel=1e-4)
    assert (stats.kept_mass == stats.judged) is (stats.pages_read == pages) is (threshold == 0.999)
    assert stats.stopped_early == sum(len(plan) < n for plan, n in zip(plans, candidates, strict=True))


def test_pages_that_were_read_ahead_of_a_stop_are_counted() -> None:
    """Threads take microbatches before it is known that they are needed."""
    layer = ServedLayer(Shape(num_threads=4), num_blocks=80)
    request = layer.start()
    layer.step([(request, 2000)])
    layer.attention.reset_stats()
    selection = SelectionSpec(ranked=True, threshold=0.3, microbatch_pages=1)
    layer.step([(request, 1)], selection=selection, retained=RETAINED)
    stats, plans = layer.attention.stats(), [layer.attention.last_plan(0, kv_head) for kv_head in range(2)]
    assert stats.stopped_early == 2
    assert stats.pages_wasted > 0
    assert stats.pages_wasted + sum(map(len, plans)) <= stats.pages_candidate
