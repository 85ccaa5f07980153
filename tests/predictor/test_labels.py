"""Labels, compared with trying every budget, one attention for each."""

import pytest
import torch

from tests.predictor.cases import RETAINED, SCALE, random_layer
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.labels import LABEL_GRANULARITIES, fit_growth, is_streaming, label_heads
from vllm_hybrid_sparse.predictor.labels_reference import least_budgets


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [48, 63, 64, 175, 336], ids=lambda tokens: f"{tokens}tokens")
@pytest.mark.parametrize("tau", [0.02, 0.2])
def test_budgets_are_those_of_trying_each(group: int, tokens: int, tau: float) -> None:
    layer = random_layer(group, tokens, seed=tokens)
    labels = label_heads(*layer, SCALE, RETAINED, tau)
    least, settled = least_budgets(*layer, SCALE, RETAINED, tau)
    assert labels.budgets.tolist() == [pytest.approx(row, abs=1e-12) for row in least]
    assert labels.settled.tolist() == [pytest.approx(row[1:], abs=1e-12) for row in settled]
    assert is_streaming(labels.budgets).tolist() == [row[0] == 0 for row in least]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [48, 64, 175, 336], ids=lambda tokens: f"{tokens}tokens")
def test_where_page_weights_are_given_they_rank_the_blocks_and_the_keys_do_not(group: int, tokens: int) -> None:
    layer = random_layer(group, tokens, seed=tokens)
    pages = len(range(*RETAINED.candidate_range(tokens)))
    weights = torch.randn(2 * group, pages, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    labels = label_heads(*layer, SCALE, RETAINED, 0.05, weights)
    least, settled = least_budgets(*layer, SCALE, RETAINED, 0.05, weights)
    assert labels.budgets.tolist() == [pytest.approx(row, abs=1e-12) for row in least]
    assert labels.settled.tolist() == [pytest.approx(row[1:], abs=1e-12) for row in settled]
    by_bounds = label_heads(*layer, SCALE, RETAINED, 0.05)
    assert labels.budgets[:, 0].tolist() == by_bounds.budgets[:, 0].tolist()
    if pages > 8:
        assert (labels.budgets[:, 1:] != by_bounds.budgets[:, 1:]).any()


@pytest.mark.parametrize(("share", "group", "tokens"), [(0.5, 1, 48), (0.5, 3, 175), (1.0, 3, 336)])
def test_blocks_may_stand_for_what_the_others_weigh(share: float, group: int, tokens: int) -> None:
    layer = random_layer(group, tokens, seed=tokens)
    first, end = RETAINED.candidate_range(tokens)
    keys = layer.keys.repeat_interleave(group, dim=0)[:, 16 * first : 16 * end].unflatten(1, (-1, 16))
    weights = (SCALE * torch.einsum("hd,hptd->hpt", layer.query, keys)).logsumexp(dim=-1)  # as if codes were exact
    labels = label_heads(*layer, SCALE, RETAINED, 0.05, weights, share)
    least, settled = least_budgets(*layer, SCALE, RETAINED, 0.05, weights, share)
    assert labels.budgets.tolist() == [pytest.approx(row, abs=1e-12) for row in least]
    assert labels.settled.tolist() == [pytest.approx(row[1:], abs=1e-12) for row in settled]
    left_out = label_heads(*layer, SCALE, RETAINED, 0.05, weights)
    assert labels.budgets[:, 0].tolist() == left_out.budgets[:, 0].tolist()
    assert (labels.budgets != left_out.budgets).any() == (tokens > 48)


@pytest.mark.parametrize("too_high", [12.0, 20.0])
def test_what_is_left_of_estimates_that_are_too_high_counts(too_high: float) -> None:
    """In float32, as samples are labelled: one page is estimated e^20 too high, and read first."""
    group, tokens, share = 3, 336, 0.5
    layer = random_layer(group, tokens, seed=2)
    first, end = RETAINED.candidate_range(tokens)
    keys = layer.keys.repeat_interleave(group, dim=0)[:, 16 * first : 16 * end].unflatten(1, (-1, 16))
    weights = (SCALE * torch.einsum("hd,hptd->hpt", layer.query, keys)).logsumexp(dim=-1)
    weights[:, 3] = weights.amax(dim=1) + too_high
    in_float32 = (part.float() for part in layer)
    labels = label_heads(*in_float32, SCALE, RETAINED, 0.05, weights.float(), share)
    least, settled = least_budgets(*layer, SCALE, RETAINED, 0.05, weights, share)
    assert labels.budgets.tolist() == [pytest.approx(row, abs=1e-6) for row in least]
    assert labels.settled.tolist() == [pytest.approx(row[1:], abs=1e-6) for row in settled]


def test_without_page_weights_nothing_is_known_of_the_unread() -> None:
    with pytest.raises(ConfigError, match=r"attributed=0\.5: must be 0 where"):
        label_heads(*random_layer(1, 64, seed=0), SCALE, RETAINED, 0.1, None, 0.5)


def test_the_cases_hold_streaming_and_retrieval_heads_and_errors_that_rise_again() -> None:
    labels = label_heads(*random_layer(8, 401, seed=401), SCALE, RETAINED, 0.1)
    assert 0 < is_streaming(labels.budgets).sum() < 16
    assert (labels.settled > labels.budgets[:, 1:]).any()
    assert (labels.settled >= labels.budgets[:, 1:]).all()


@pytest.mark.parametrize("tokens", [1, 16, 31, 47])
def test_without_candidates_every_head_streams(tokens: int) -> None:
    labels = label_heads(*random_layer(3, tokens, seed=0), SCALE, RETAINED, 0.1)
    assert labels.budgets.tolist() == [[0.0] * 5] * 6
    assert labels.settled.tolist() == [[0.0] * 4] * 6
    assert is_streaming(labels.budgets).all()


def test_one_block_is_all_or_nothing() -> None:
    labels = label_heads(*random_layer(4, 48, seed=1), SCALE, RETAINED, 0.05)
    assert set(labels.budgets[:, 1:].flatten().tolist()) == {0.0, 1.0}


def test_budget_of_a_needle_is_its_block() -> None:
    layer = random_layer(1, 32 + 320, seed=2, kv_heads=1)
    layer.keys[0, 16 + 200] = 40 * layer.query[0] / layer.query[0].norm()  # all the weight on one host token
    layer.query[0] *= 30
    labels = label_heads(*layer, SCALE, RETAINED, 0.01)
    assert labels.budgets[0].tolist() == pytest.approx([blk / 320 for blk in LABEL_GRANULARITIES])


def test_a_head_of_small_output_streams_where_another_is_large() -> None:
    layer = random_layer(1, 400, seed=3)
    before = label_heads(*layer, SCALE, RETAINED, 0.02)
    layer.values[1] *= 1e4
    after = label_heads(*layer, SCALE, RETAINED, 0.02)
    assert not is_streaming(before.budgets)[0]
    assert is_streaming(after.budgets).tolist() == [True, False]


def test_bfloat16_is_labelled_in_float32() -> None:
    layer = [tensor.bfloat16() for tensor in random_layer(3, 175, seed=4)]
    exact = label_heads(*(tensor.double() for tensor in layer), SCALE, RETAINED, 0.1)
    labels = label_heads(*layer, SCALE, RETAINED, 0.1)
    assert labels.budgets.dtype == torch.float32
    torch.testing.assert_close(labels.budgets.double(), exact.budgets, rtol=0, atol=1e-6)


def test_growth_is_the_least_squares_slope_through_the_budget_of_single_tokens() -> None:
    generator = torch.Generator().manual_seed(5)
    budgets = torch.rand(20, 5, generator=generator, dtype=torch.float64)
    log_blk = torch.tensor([0.0, 4, 5, 6, 7], dtype=torch.float64)
    best = torch.linalg.lstsq(log_blk[:, None], (budgets - budgets[:, :1]).T).solution[0]
    torch.testing.assert_close(fit_growth(budgets), best)
    line = 0.1 + 0.05 * log_blk
    assert float(fit_growth(line)) == pytest.approx(0.05)


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_no_error_at_all_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=f"tau={tau}: must be above 0"):
        label_heads(*random_layer(1, 64, seed=0), SCALE, RETAINED, tau)
