"""The references of `summarize` and `score`: what an estimate promises about the tokens behind it."""

import pytest
import torch

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_minmax_bounds_every_key_of_its_page_and_touches_one(dtype: torch.dtype) -> None:
    keys = torch.randn(48, 32).to(dtype)
    upper, lower = summarize_pages(keys, "minmax").unbind(dim=1)
    for page in range(3):
        tokens = keys[16 * page : 16 * page + 16]
        assert (tokens <= upper[page]).all()
        assert (tokens == upper[page]).any(dim=0).all()
        assert (tokens >= lower[page]).all()
        assert (tokens == lower[page]).any(dim=0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuboid_mean_is_the_centre_of_the_bounds_rounded_once(dtype: torch.dtype) -> None:
    keys = (100 * torch.randn(48, 32)).to(dtype)
    upper, lower = summarize_pages(keys, "minmax").float().unbind(dim=1)
    centre = summarize_pages(keys, "cuboid_mean")
    assert centre.shape == (3, 1, 32)
    assert centre.dtype == dtype
    assert torch.equal(centre[:, 0], ((upper + lower) / 2).to(dtype))


def test_cuboid_mean_of_large_half_precision_keys_does_not_overflow() -> None:
    keys = torch.full((16, 16), 60_000.0, dtype=torch.float16)
    assert torch.equal(summarize_pages(keys, "cuboid_mean"), keys[:1].unsqueeze(0))


@pytest.mark.parametrize(("summary", "vectors"), [("minmax", 2), ("cuboid_mean", 1)])
def test_no_pages_give_no_summaries_and_no_scores(summary: str, vectors: int) -> None:
    summaries = summarize_pages(torch.empty(0, 16), summary)
    assert summaries.shape == (0, vectors, 16)
    assert score_pages(torch.ones(3, 16), summaries, 1.0, summary).shape == (3, 0)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("scale", [0.125, 0.7])
def test_minmax_score_bounds_the_score_of_every_token(group: int, scale: float) -> None:
    query, keys = torch.randn(group, 64), torch.randn(160, 64)
    token_scores = scale * query.double() @ keys.double().T
    page_scores = score_pages(query, summarize_pages(keys, "minmax"), scale, "minmax")
    assert page_scores.shape == (group, 10)
    assert (token_scores.view(group, 10, 16) <= page_scores.unsqueeze(-1)).all()


def test_minmax_score_is_reached_by_a_page_of_equal_tokens() -> None:
    query, key = torch.randn(3, 32), torch.randn(1, 32)
    page_scores = score_pages(query, summarize_pages(key.expand(16, 32), "minmax"), 0.25, "minmax")
    assert_close(page_scores, 0.25 * query.double() @ key.double().T)


def test_cuboid_mean_score_is_the_score_of_the_centre() -> None:
    query = torch.tensor([[1.0, -2.0, *[0.0] * 14]])
    keys = torch.zeros(16, 16)
    keys[3, 0], keys[5, 0], keys[7, 1] = 4.0, -1.0, 10.0
    page_scores = score_pages(query, summarize_pages(keys, "cuboid_mean"), 0.5, "cuboid_mean")
    assert page_scores.tolist() == [[0.5 * (1.0 * 1.5 - 2.0 * 5.0)]]


def test_minmax_score_takes_the_better_bound_of_each_dimension() -> None:
    query = torch.tensor([[1.0, -2.0, *[0.0] * 14]])
    keys = torch.zeros(16, 16)
    keys[3, 0], keys[5, 0], keys[7, 1] = 4.0, -1.0, 10.0
    page_scores = score_pages(query, summarize_pages(keys, "minmax"), 0.5, "minmax")
    assert page_scores.tolist() == [[0.5 * (1.0 * 4.0 - 2.0 * 0.0)]]
