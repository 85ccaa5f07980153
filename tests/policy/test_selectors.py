"""The order of candidate pages and where to stop in it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.policy.selectors import SpecSelector, group_scores, rank_pages
from vllm_hybrid_sparse.values import SelectionSpec

page_scores = arrays(
    np.float64, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20), elements=st.floats(-50, 50)
)


def selector_of(**settings: Any) -> SpecSelector:
    return SpecSelector(HybridSparseConfig(**settings).selection)


@given(page_scores)
def test_group_score_is_the_log_of_the_largest_share_that_a_head_gives(scores: NDArray[np.float64]) -> None:
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(group_scores(scores)), shares.max(axis=0), rtol=1e-9)


@given(page_scores, st.data())
def test_group_score_ignores_what_is_added_to_all_scores_of_a_head(
    scores: NDArray[np.float64], data: st.DataObject
) -> None:
    shift = data.draw(arrays(np.float64, (scores.shape[0], 1), elements=st.floats(-50, 50)))
    np.testing.assert_allclose(group_scores(scores + shift), group_scores(scores), atol=1e-9)


def test_group_score_does_not_overflow() -> None:
    np.testing.assert_allclose(group_scores(np.array([[1e4, -1e4], [-3e4, -3e4]])), [0.0, np.log(0.5)])


def test_one_head_that_looks_at_one_page_outranks_many_that_look_everywhere() -> None:
    scores = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0]])
    assert rank_pages(group_scores(scores))[0] == 2


EVEN_AND_PEAKED = np.log([[0.28, 0.24, 0.26, 0.22], [0.9, 0.04, 0.01, 0.05]])
SECOND_UNSURE = np.array([0.0, 1.0])  # by e^3 = 20 if it is off by three deviations


def test_a_head_s_shares_may_be_larger_than_estimated() -> None:
    assert rank_pages(group_scores(EVEN_AND_PEAKED)).tolist() == [0, 2, 1, 3]
    raised = group_scores(EVEN_AND_PEAKED, None, SECOND_UNSURE)
    np.testing.assert_allclose(np.exp(raised), [0.9 * np.e**3, 0.04 * np.e**3, 0.26, 0.05 * np.e**3])
    assert rank_pages(raised).tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SelectionSpec(ranked=True, threshold=0.9, estimated_remainder=True), [0, 3, 1, 2]),
        (SelectionSpec(ranked=True, threshold=0.9), [0, 2, 1, 3]),
        (SelectionSpec(ranked=True, estimated_remainder=True, max_pages=3), [0, 2, 1]),
        (SelectionSpec(ranked=True, max_pages=3), [0, 2, 1]),
        (SelectionSpec(), [0, 1, 2, 3]),
    ],
)
def test_a_threshold_on_an_estimated_remainder_alone_stops_by_estimates(
    spec: SelectionSpec, expected: list[int]
) -> None:
    assert SpecSelector(spec).order(EVEN_AND_PEAKED, None, SECOND_UNSURE).tolist() == expected


@given(page_scores)
def test_one_head_ranks_by_its_scores_alone(scores: NDArray[np.float64]) -> None:
    order = rank_pages(group_scores(scores[:1]))
    assert np.all(np.diff(group_scores(scores[:1])[order]) <= 0)
    assert np.all(np.diff(scores[0][order]) <= 1e-9)


@given(arrays(np.float32, st.integers(0, 40), elements=st.sampled_from([0.0, 1.0, 2.0])))
def test_ranking_is_descending_with_ties_by_the_lower_page(scores: NDArray[np.float32]) -> None:
    expected = sorted(range(len(scores)), key=lambda page: (-scores[page], page))
    assert rank_pages(scores).tolist() == expected


@pytest.mark.parametrize("spec", [SelectionSpec(), SelectionSpec(ranked=True), SelectionSpec(ranked=True, max_pages=3)])
def test_no_candidates_give_an_empty_order(spec: SelectionSpec) -> None:
    assert SpecSelector(spec).order(np.empty((4, 0))).size == 0


def test_dense_reads_every_page_in_the_order_of_the_request() -> None:
    selector = selector_of(policy="dense")
    assert selector.order(np.array([[1.0, 3.0, 2.0]])).tolist() == [0, 1, 2]
    assert not selector.is_done(np.ones(1))


@given(page_scores, st.integers(1, 30))
def test_topk_takes_the_first_pages_of_the_ranking(scores: NDArray[np.float64], topk_pages: int) -> None:
    selector = selector_of(policy="topk", topk_pages=topk_pages)
    expected = rank_pages(group_scores(scores))[:topk_pages]
    assert selector.order(scores).tolist() == expected.tolist()


@pytest.mark.parametrize(("num_candidates", "expected"), [(1, 1), (20, 1), (21, 2), (100, 5)])
def test_topk_by_default_takes_five_percent_rounded_up(num_candidates: int, expected: int) -> None:
    selector = selector_of(policy="topk")
    assert selector.order(np.zeros((1, num_candidates))).size == expected


def test_topk_never_stops_before_its_budget() -> None:
    assert not selector_of(policy="topk").is_done(np.ones(3))


@given(page_scores)
def test_progressive_may_read_every_page(scores: NDArray[np.float64]) -> None:
    order = selector_of(policy="progressive").order(scores)
    assert order.tolist() == rank_pages(group_scores(scores)).tolist()


@pytest.mark.parametrize(
    ("mass", "done"), [([0.96, 0.97], True), ([0.95, 0.97], False), ([0.2, 1.0], False), ([0.951], True)]
)
def test_progressive_stops_once_every_head_exceeds_the_threshold(mass: list[float], done: bool) -> None:
    assert selector_of(policy="progressive", threshold=0.95).is_done(np.array(mass)) is done


def test_threshold_one_never_stops() -> None:
    assert not selector_of(policy="progressive", threshold=1.0).is_done(np.ones(2))


def test_policies_load_no_torch() -> None:
    program = "import sys, vllm_hybrid_sparse.policy.selectors as s; assert not {'torch', 'vllm'} & set(sys.modules), s"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
