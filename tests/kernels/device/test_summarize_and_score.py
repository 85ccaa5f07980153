"""Summaries, page scores, group scores and ranks, against the references on logical keys."""

import pytest
import torch
from torch import Tensor

from tests.tolerances import SCORE_TIE
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.score import gpu as score
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.summarize.gpu import summarize_slots
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.policy.selectors import group_scores, rank_pages

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALE = 0.25
summaries_of_both_kinds = pytest.mark.parametrize(("summary", "vectors"), [("minmax", 2), ("cuboid_mean", 1)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80])
@summaries_of_both_kinds
def test_summaries_of_slots_are_those_of_the_pages(
    summary: str, vectors: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    k_pool = (100 * torch.randn(6, 16, head_dim)).to(dtype)
    k_pool[5] = torch.nan
    summaries = torch.full((8, vectors, head_dim), torch.nan, dtype=dtype, device=device)
    slots = torch.tensor([3, -1, 0, 4], dtype=torch.int32)
    places = torch.tensor([7, 1, 2, 0], dtype=torch.int32)
    summarize_slots(k_pool.to(device), slots.to(device), places.to(device), summaries, summary=summary)
    for slot, place in ((3, 7), (0, 2), (4, 0)):
        expected = summarize_pages(k_pool[slot], summary)[0]
        if device.type == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts to bf16 where a GPU rounds
            torch.testing.assert_close(summaries[place], expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(summaries[place].cpu(), expected)
    assert summaries[[1, 3, 4, 5, 6]].isnan().all()


def test_large_half_precision_keys_do_not_overflow(device: torch.device) -> None:
    k_pool = torch.full((1, 16, 16), 60_000.0, dtype=torch.float16, device=device)
    summaries = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    summarize_slots(k_pool, zero, zero, summaries, summary="cuboid_mean")
    assert torch.equal(summaries[0, 0], k_pool[0, 0])


def make_summaries(pages: int, vectors: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Summaries of random pages; the place behind the last is NaN."""
    keys = torch.randn(pages * 16, head_dim).to(dtype)
    made = summarize_pages(keys, "minmax" if vectors == 2 else "cuboid_mean")
    return torch.cat((made, torch.full_like(made[:1], torch.nan)))


@pytest.mark.parametrize(("group", "dtype"), [(1, DTYPES[0]), (3, DTYPES[1]), (4, DTYPES[2]), (8, DTYPES[0])])
@pytest.mark.parametrize(("pages", "head_dim"), [(1, 16), (31, 48), (33, 16)])
@summaries_of_both_kinds
def test_page_scores(
    summary: str, vectors: int, pages: int, head_dim: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, kv_heads = 2, 2
    summaries = make_summaries(40, vectors, head_dim, dtype)
    query = torch.randn(rows, kv_heads * group, head_dim).to(dtype)
    places = torch.stack([torch.randperm(40)[:pages] for _ in range(rows * kv_heads)]).view(rows, kv_heads, pages).int()
    places[1, 0, pages // 2 :] = -1
    actual = score.score_pages(
        query.to(device), summaries.to(device), places.to(device), scale=SCALE, summary=summary
    ).cpu()
    for row in range(rows):
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            at = places[row, kv_head]
            expected = score_pages(query[row, heads], summaries[at.long()], SCALE, summary)
            expected[:, at < 0] = -torch.inf
            torch.testing.assert_close(actual[row, heads].double(), expected, rtol=1e-5, atol=SCORE_TIE / 10)


@pytest.mark.parametrize("group", [1, 3, 8, 20])
@pytest.mark.parametrize("pages", [1, 255, 257])
@pytest.mark.parametrize(("has_retained", "has_deviations"), [(False, False), (True, False), (True, True)])
def test_group_scores_and_ranks(
    has_retained: bool, has_deviations: bool, pages: int, group: int, device: torch.device
) -> None:
    page_scores = 3 * torch.randn(2, 2 * group, pages)
    page_scores[1, :, pages - pages // 3 :] = -torch.inf
    retained = 4 * torch.randn(2, 2 * group) if has_retained else None
    deviations = 2 * torch.rand(2, 2 * group) if has_deviations else None
    given = [None if part is None else part.to(device) for part in (retained, deviations)]
    actual = score.group_scores(page_scores.to(device), 2, *given)
    order = score.rank_pages(actual).cpu()
    for row in range(2):
        there = pages if row == 0 else pages - pages // 3
        for kv_head in range(2):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            of_heads = [None if part is None else part[row, heads].numpy() for part in (retained, deviations)]
            expected = group_scores(page_scores[row, heads, :there].numpy(), *of_heads)
            shares = actual[row, kv_head].cpu()
            torch.testing.assert_close(
                shares[:there].double(), torch.from_numpy(expected), rtol=1e-6, atol=SCORE_TIE / 10
            )
            assert (shares[there:] == -torch.inf).all()
            assert order[row, kv_head].sort().values.tolist() == list(range(pages))
            assert order[row, kv_head, :there].tolist() == rank_pages(shares[:there].numpy()).tolist()


def test_equal_scores_rank_by_page(device: torch.device) -> None:
    scores = torch.tensor([[[1.0, 2.0, 2.0, -torch.inf, 1.0]]], device=device)
    assert score.rank_pages(scores).flatten().tolist() == [1, 2, 0, 4, 3]


def test_the_best_pages_are_those_that_rank_first(device: torch.device) -> None:
    scores = torch.randn(2, 3, 40, device=device)
    scores[1, :, 25:] = -torch.inf
    assert torch.equal(score.best_pages(scores, 20), score.rank_pages(scores)[:, :, :20])


def test_a_head_without_weight_does_not_decide(device: torch.device) -> None:
    """Group scores are shares: a head whose scores are all large but equal leaves the choice to the other."""
    page_scores = torch.tensor([[[50.0, 50.0, 50.0], [0.0, 5.0, 1.0]]], device=device)
    assert score.rank_pages(score.group_scores(page_scores, 1)).flatten()[0] == 1


def test_no_pages_give_no_scores(device: torch.device) -> None:
    query, summaries = torch.randn(2, 3, 16, device=device), torch.randn(4, 1, 16, device=device)
    places = torch.empty(2, 1, 0, dtype=torch.int32, device=device)
    scores = score.score_pages(query, summaries, places, scale=1.0, summary="cuboid_mean")
    assert scores.shape == (2, 3, 0)
    assert score.group_scores(scores, 1).shape == (2, 1, 0)


def test_bad_arguments_are_refused_by_name() -> None:
    query, summaries, places = torch.randn(1, 2, 16), torch.randn(4, 1, 16), torch.zeros(1, 1, 3, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"summary='key_codes': must be one of minmax, cuboid_mean"):
        score.score_pages(query, summaries, places, scale=1.0, summary="key_codes")
    with pytest.raises(KernelError, match=r"summaries=\[4, 1, 16\]"):
        score.score_pages(query, summaries, places, scale=1.0, summary="minmax")
    with pytest.raises(KernelError, match=r"places=.*int32"):
        score.score_pages(query, summaries, places.long(), scale=1.0, summary="cuboid_mean")
    with pytest.raises(KernelError, match=r"deviations=\[1\]"):
        score.group_scores(torch.zeros(1, 2, 4), 1, None, torch.zeros(1))
    with pytest.raises(KernelError, match=r"q_heads=2: must be a multiple of kv_heads=3"):
        score.group_scores(torch.zeros(1, 2, 4), 3)
    with pytest.raises(KernelError, match=r"k_pool="):
        summarize_slots(torch.zeros(1, 8, 16), places[0, 0], places[0, 0], summaries, summary="cuboid_mean")
