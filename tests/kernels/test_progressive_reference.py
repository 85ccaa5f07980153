"""The literal Algorithm 1, against an example worked by hand, a second transcription and what the paper promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.progressive.reference import ProgressiveResult, progressive_attention
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=16)
WEIGHTS = [15.0, 98.0, 4.3, 84.0, 31.0, 68.0, 8.2, 10.0, 55.0, 4.9, 22.0, 6.1]  # the paper's figure 4, out of order
BY_WEIGHT = sorted(range(1, 13), key=lambda page: -WEIGHTS[page - 1])


def run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: SelectionSpec, summary: str = "minmax"
) -> ProgressiveResult:
    return progressive_attention(
        query, key, value, selector=SpecSelector(spec), retained=RETAINED, scale=1.0, summary=summary
    )


def keys_of_weights(retained_weight: float) -> torch.Tensor:
    """Keys [224, 16]: for the query e_0, candidate page p has the exp-sum WEIGHTS[p - 1]."""
    per_token = [retained_weight / 2, *WEIGHTS, retained_weight / 2]
    key = torch.zeros(14 * 16, 16, dtype=torch.float64)
    key[:, 0] = torch.tensor(per_token, dtype=torch.float64).log().repeat_interleave(16) - math.log(16)
    return key


@pytest.mark.parametrize(
    ("threshold", "retained_weight", "microbatches", "mass"),
    [
        # after 4, 8, 12 pages AS_acc = 305, 383, 406.5; AS_min = 55, 10, 4.3; N_left = 8, 4, 0
        (0.40, 0.0, 1, 305 / (305 + 55 * 8)),
        (0.42, 0.0, 2, 383 / (383 + 10 * 4)),
        (0.90, 0.0, 2, 383 / (383 + 10 * 4)),
        (0.91, 0.0, 3, 1.0),
        (0.90, 1000.0, 2, 1383 / (1383 + 10 * 4)),
        (0.74, 1000.0, 1, 1305 / (1305 + 55 * 8)),  # the retained set counts in AS_acc, not in AS_min or N_left
    ],
)
def test_an_example_by_hand(threshold: float, retained_weight: float, microbatches: int, mass: float) -> None:
    query = torch.eye(1, 16, dtype=torch.float64)
    key = keys_of_weights(retained_weight)
    result = run(query, key, key, SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=4))
    assert result.pages == BY_WEIGHT[: 4 * microbatches]
    assert result.mass[-1].item() == pytest.approx(mass, rel=1e-12)
    assert len(result.mass) == microbatches


def psa_in_plain_numbers(
    query: np.ndarray, pages: list[np.ndarray], retained: np.ndarray, *, order: list[int], threshold: float, m: int
) -> list[int]:
    """Algorithm 1 once more, on exponentials as printed, one head of a group at a time; returns the pages read."""
    heads = range(len(query))
    as_acc = [float(np.exp(retained @ query[h]).sum()) for h in heads]
    as_min = [math.inf for _ in heads]
    read: list[int] = []
    while len(read) < len(order):
        for page in order[len(read) : len(read) + m]:
            read.append(page)
            for h in heads:
                page_as = float(np.exp(pages[page] @ query[h]).sum())
                as_acc[h] += page_as
                as_min[h] = min(as_min[h], page_as)
        n_left = len(order) - len(read)
        if all(as_acc[h] / (as_acc[h] + as_min[h] * n_left) > threshold for h in heads):
            break
    return read


@given(
    seed=st.integers(0, 2**31),
    candidates=st.integers(1, 12),
    group=st.integers(1, 5),
    microbatch_pages=st.integers(1, 9),
    threshold=st.floats(0.05, 1.0),
    spread=st.sampled_from([0.3, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_two_transcriptions_read_the_same_pages(
    *, seed: int, candidates: int, group: int, microbatch_pages: int, threshold: float, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn((candidates + 2) * 16, 16, generator=generator, dtype=torch.float64)
    query = spread * torch.randn(group, 16, generator=generator, dtype=torch.float64)
    ranking = run(query, key, key, SelectionSpec(ranked=True, microbatch_pages=1)).pages
    assert sorted(ranking) == list(range(1, candidates + 1))

    spec = SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=microbatch_pages)
    pages = list(key.view(-1, 16, 16).numpy())
    expected = psa_in_plain_numbers(
        query.numpy(),
        pages,
        np.concatenate((pages[0], pages[-1])),
        order=ranking,
        threshold=threshold,
        m=microbatch_pages,
    )
    assert run(query, key, key, spec).pages == expected


def test_threshold_one_reads_every_page_and_is_exact() -> None:
    query, key, value = torch.randn(3, 32), 3 * torch.randn(400, 32), torch.randn(400, 32)
    result = run(query, key, value, SelectionSpec(ranked=True, threshold=1.0, microbatch_pages=4))
    assert sorted(result.pages) == list(range(*RETAINED.candidate_range(400)))
    out, lse = attend_pages(query, key, value, range(25), 1.0)
    assert_close(result.out, out)
    assert_close(result.lse, lse)


@pytest.mark.parametrize("threshold", [1e-6, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
def test_output_is_attention_over_the_retained_set_and_the_pages_read(threshold: float, summary: str) -> None:
    query, key, value = torch.randn(4, 32), torch.randn(410, 32), torch.randn(410, 32)
    result = run(query, key, value, SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=2), summary)
    out, lse = attend_pages(query, key, value, [*RETAINED.retained_pages(410), *result.pages], 1.0)
    assert_close(result.out, out)
    assert_close(result.lse, lse)


def test_at_least_one_microbatch_is_read_however_low_the_threshold() -> None:
    key = torch.randn(400, 16)
    result = run(torch.randn(1, 16), key, key, SelectionSpec(ranked=True, threshold=1e-9, microbatch_pages=5))
    assert len(result.pages) == 5


def test_the_last_microbatch_may_be_short() -> None:
    key = torch.randn(16 * 9, 16)
    result = run(torch.randn(1, 16), key, key, SelectionSpec(ranked=True, threshold=1.0, microbatch_pages=5))
    assert len(result.pages) == 7
    assert len(result.mass) == 2


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 32, 47])
def test_a_request_without_candidates_attends_to_all_of_it(seq_len: int) -> None:
    query, key, value = torch.randn(2, 16), torch.randn(seq_len, 16), torch.randn(seq_len, 16)
    result = run(query, key, value, SelectionSpec(ranked=True, threshold=0.5))
    assert result.pages == []
    assert result.mass == []
    assert_close(result.out, attend_pages(query, key, value, range(3), 1.0)[0])


def test_a_group_goes_on_until_its_last_head_is_done() -> None:
    key = torch.randn(480, 16, dtype=torch.float64)
    flat, peaked = torch.zeros(1, 16, dtype=torch.float64), 8 * torch.randn(1, 16, dtype=torch.float64)
    spec = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=1)
    alone = len(run(peaked, key, key, spec).pages)
    together = run(torch.cat((peaked, flat)), key, key, spec)
    assert alone < len(together.pages)
    assert (together.mass[-1] > 0.9).all()
    assert together.mass[-2][0] > 0.9 >= together.mass[-2][1]


def test_huge_scores_do_not_overflow() -> None:
    query, key = 100 * torch.randn(2, 16), 100 * torch.randn(320, 16)
    result = run(query, key, key, SelectionSpec(ranked=True, threshold=0.95))
    for computed in (result.out, result.lse, result.mass[-1]):
        assert computed.isfinite().all()


def test_a_budget_ends_the_reading_in_the_order_of_the_ranking() -> None:
    query, key = torch.randn(2, 16), torch.randn(320, 16)
    ranking = run(query, key, key, SelectionSpec(ranked=True)).pages
    assert run(query, key, key, SelectionSpec(ranked=True, max_pages=7)).pages == ranking[:7]
