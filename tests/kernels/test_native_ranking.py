"""The native core's choice of the best pages: exact, whatever the scores' range."""

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=0, window_tokens=16)
SHAPE = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "summary": "cuboid_mean", "scale": 1.0}
ULP = 2.0**-14  # of float32 between 512 and 1024


def pages_read(isa: str, page_scores: torch.Tensor, wanted: int) -> list[int]:
    """The pages that `topk` reads if the candidate pages have these scores, [pages] exact in float32."""
    shape = Shape(isa=isa, dtype=torch.float32, **SHAPE)
    layer = ServedLayer(shape, num_blocks=len(page_scores) // 2 + 3)
    request = layer.start()
    tokens = torch.zeros(16 * len(page_scores) + 15, 3, 16)  # query, key, value
    tokens[: 16 * len(page_scores), 1, 0] = page_scores.repeat_interleave(16)
    layer.step([(request, len(tokens))], tokens=tokens)
    last = torch.zeros(1, 3, 16)
    last[0, 0, 0] = 1.0
    layer.step([(request, 1)], selection=SelectionSpec(ranked=True, max_pages=wanted), retained=RETAINED, tokens=last)
    return layer.attention.last_plan(0, 0)


def best_pages(page_scores: torch.Tensor, wanted: int) -> list[int]:
    ranked = torch.sort(page_scores, descending=True, stable=True).indices
    return sorted(ranked[:wanted].tolist())


@pytest.mark.parametrize("wanted", [1, 16, 37, 198])
@pytest.mark.parametrize("count", [199, 208])
def test_neighbouring_floats_far_from_zero_are_told_apart_and_ties_go_to_the_lower_page(
    isa: str, count: int, wanted: int
) -> None:
    scores = 900.0 + ULP * (torch.randperm(count) // 3)
    assert pages_read(isa, scores, wanted) == best_pages(scores, wanted)


@pytest.mark.parametrize("wanted", [1, 37])
def test_one_far_off_page_leaves_all_others_in_one_bucket(isa: str, wanted: int) -> None:
    scores = ULP * torch.randperm(150).float()
    scores[77] = -60_000.0
    assert pages_read(isa, scores, wanted) == best_pages(scores, wanted)
    scores[77] = 60_000.0
    assert pages_read(isa, scores, wanted) == best_pages(scores, wanted)


def test_of_equal_scores_the_first_pages_are_read(isa: str) -> None:
    assert pages_read(isa, torch.full((100,), -3.5), 10) == list(range(10))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spoilt", [slice(None), slice(20, 60), slice(99, None)])
@pytest.mark.parametrize("wanted", [1, 10, 70])
def test_scores_that_are_not_finite_end_in_as_many_pages_as_asked_for(
    isa: str, bad: float, spoilt: slice, wanted: int
) -> None:
    """A model that has overflowed answers nonsense, but other requests must not fail with it."""
    scores = torch.randn(100)
    scores[spoilt] = bad
    read = pages_read(isa, scores, wanted)
    assert len(read) == wanted
    assert sorted(set(read)) == read
    assert 0 <= read[0] <= read[-1] < 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_threshold_over_scores_that_are_not_finite_comes_to_an_end(isa: str, bad: float) -> None:
    scores = torch.randn(300)
    scores[torch.arange(0, 300, 3)] = bad
    shape = Shape(isa=isa, dtype=torch.float32, **SHAPE)
    layer = ServedLayer(shape, num_blocks=160)
    request = layer.start()
    tokens = torch.zeros(16 * 300 + 15, 3, 16)
    tokens[: 16 * 300, 1, 0] = scores.repeat_interleave(16)
    layer.step([(request, len(tokens))], tokens=tokens)
    last = torch.zeros(1, 3, 16)
    last[0, 0, 0] = 1.0
    layer.step([(request, 1)], selection=SelectionSpec(ranked=True, threshold=0.9), retained=RETAINED, tokens=last)
    read = layer.attention.last_plan(0, 0)
    assert sorted(set(read)) == sorted(read)
    assert all(0 <= page < 300 for page in read)
