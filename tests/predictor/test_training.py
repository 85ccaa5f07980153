"""Training is repeatable and learns what there is to learn, and validation counts correctly."""

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES, predicted_budgets
from vllm_hybrid_sparse.predictor.model import HeadProperties, Predictor
from vllm_hybrid_sparse.predictor.samples import Samples
from vllm_hybrid_sparse.predictor.training import TrainingConfig, split_prompts, train
from vllm_hybrid_sparse.predictor.validation import validate

LOG_BLK = np.log2([1, 16, 32, 64, 128])
CONFIG = TrainingConfig(epochs=30, batch_heads=128, quantile=0.5)


def prompt(seed: int, steps: int = 4) -> Samples:
    """Labels that follow from features 7 and 8 by eq. 1; a head streams where feature 9 is positive."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(steps, 3, 6, 41)).astype(np.float32)
    base = 0.1 + 0.1 * np.abs(np.tanh(features[..., 7]))
    budgets = base[..., None] + 0.05 * np.abs(features[..., 8:9]) * LOG_BLK / 7
    budgets[features[..., 9] > 0] = 0
    budgets = budgets.astype(np.float32)
    settled = np.minimum(budgets[..., 1:] * 1.5, 1)
    return Samples(features, budgets, settled, np.arange(steps) * 512 + 1024)


def silent(epoch: int, loss: float) -> None:
    assert epoch > 0
    assert loss > 0


def test_training_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    prompts, short = [prompt(0), prompt(1)], TrainingConfig(epochs=2, batch_heads=32)
    first, again = (train(prompts, short, silent).state_dict() for _ in range(2))
    other = train(prompts, TrainingConfig(epochs=2, batch_heads=32, seed=1), silent).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["outputs.weight"], other["outputs.weight"])


def test_training_does_not_touch_the_callers_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    train([prompt(0)], TrainingConfig(epochs=1), silent)
    assert torch.equal(torch.rand(1), expected)


def test_what_follows_from_the_features_is_learnt() -> None:
    predictor = train([prompt(seed, steps=30) for seed in range(4)], CONFIG, silent)
    figures = validate(predictor, [prompt(9, steps=20)], kv_heads=2)
    assert figures["streaming_precision"] > 0.9
    assert figures["streaming_recall"] > 0.9
    spread = np.abs(prompt(9).budgets[..., 0][prompt(9).budgets[..., 0] > 0] - 0.145).mean()
    assert figures["base_budget_error"] < 0.6 * spread  # the error of a constant guess


@pytest.mark.parametrize("quantile", [0.25, 0.9])
def test_the_quantile_is_the_share_of_budgets_that_suffice(quantile: float) -> None:
    rng = np.random.default_rng(0)
    samples = prompt(0, steps=200)
    noise = rng.uniform(0.1, 0.5, samples.budgets.shape[:-1]).astype(np.float32)  # nothing in the features tells it
    budgets = np.repeat(noise[..., None], 5, axis=-1)
    samples = Samples(np.zeros_like(samples.features), budgets, budgets[..., 1:], samples.host_tokens)
    config = TrainingConfig(epochs=10, batch_heads=128, quantile=quantile)
    predicted = train([samples], config, silent).predict(torch.zeros(1, 41))
    for blk in GRANULARITIES:
        budget = predicted_budgets(predicted.base_budget.numpy(), predicted.growth.numpy(), blk)
        assert float((noise <= budget).mean()) == pytest.approx(quantile, abs=0.05)


def test_the_quantile_is_that_of_each_budget_and_not_of_the_two_properties_it_is_made_of() -> None:
    """bgt_0 and k scatter independently, so the sum of their quantiles would suffice more often."""
    rng = np.random.default_rng(0)
    samples = prompt(0, steps=200)
    base, growth = (rng.uniform(*span, samples.budgets.shape[:-1]) for span in ((0.1, 0.3), (0.0, 0.05)))
    budgets = (base[..., None] + growth[..., None] * LOG_BLK).astype(np.float32)
    samples = Samples(np.zeros_like(samples.features), budgets, budgets[..., 1:], samples.host_tokens)
    config = TrainingConfig(epochs=20, batch_heads=128, quantile=0.8)
    predicted = train([samples], config, silent).predict(torch.zeros(1, 41))
    line = float(predicted.base_budget) + float(predicted.growth) * LOG_BLK
    suffices = (budgets <= line).mean(axis=(0, 1, 2))
    assert suffices[1:] == pytest.approx(0.8, abs=0.03)
    apart = (budgets <= np.quantile(base, 0.8) + np.quantile(growth, 0.8) * LOG_BLK).mean(axis=(0, 1, 2))
    assert (apart[1:] > 0.9).all()


@pytest.mark.parametrize(("quantile", "skipped"), [(0.5, True), (0.6, True), (0.8, False), (0.9, False)])
def test_a_head_is_skipped_only_where_that_is_as_sure_as_the_quantile(quantile: float, skipped: bool) -> None:
    """Seven of ten heads stream, and nothing in the features tells which."""
    samples = prompt(0, steps=200)
    streams = np.random.default_rng(0).permutation(np.arange(samples.budgets[..., 0].size) % 10 < 7)
    budgets = np.where(streams.reshape(samples.budgets.shape[:-1])[..., None], 0, np.float32(0.25)).repeat(5, axis=-1)
    samples = Samples(np.zeros_like(samples.features), budgets, budgets[..., 1:], samples.host_tokens)
    config = TrainingConfig(epochs=10, batch_heads=128, quantile=quantile)
    predicted = train([samples], config, silent).predict(torch.zeros(1, 41))
    assert bool(predicted.streaming >= 0.5) is skipped


def test_constant_features_are_left_out() -> None:
    samples = prompt(0)
    samples.features[..., 3] = 320.0
    predictor = train([samples], TrainingConfig(epochs=1), silent)
    assert float(predictor.feature_std[3]) == 1
    assert float(predictor.feature_mean[3]) == pytest.approx(320)


class Fixed(Predictor):
    """Says what it is told to say."""

    def __init__(self, base: np.ndarray, growth: np.ndarray, streaming: np.ndarray) -> None:
        super().__init__()
        self._answers = [torch.from_numpy(part.astype(np.float32)).flatten() for part in (base, growth, streaming)]

    def predict(self, features: torch.Tensor) -> HeadProperties:  # noqa: ARG002
        return HeadProperties(*self._answers)


def test_validation_counts_heads_by_hand() -> None:
    # one step, one layer, two groups of two heads, 1024 host tokens, budgets flat in blk: so blocks of 128 are chosen
    least = np.array([[[0.25, 0.5, 0.0, 0.0]]])
    budgets = np.repeat(least[..., None], 5, axis=-1).astype(np.float32)
    settled = np.repeat(np.array([[[0.25, 0.75, 0.0, 0.0]]])[..., None], 4, axis=-1).astype(np.float32)
    samples = Samples(np.zeros((1, 1, 4, 41), np.float32), budgets, settled, np.array([1024]))
    predicted = Fixed(np.array([0.2, 0.6, 0.3, 0.5]), np.zeros(4), np.array([0.1, 0.2, 0.4, 0.9]))
    figures = validate(predicted, [samples], kv_heads=2)
    assert figures["heads"] == 4
    assert figures["base_budget_error"] == pytest.approx((0.05 + 0.1) / 2)
    assert figures["budget_error_64"] == pytest.approx((0.05 + 0.1) / 2)
    assert figures["growth_error"] == figures["fit_error_16"] == 0
    assert figures["streaming_share"] == 0.5
    assert figures["streaming_precision"] == 1.0
    assert figures["streaming_recall"] == 0.5
    # of 8 blocks of 128 tokens: predicted 2, 5, 3, none; least 2, 4, 0, 0; settled 2, 6, 0, 0
    assert figures["reached"] == 1.0
    assert figures["reached_settled"] == 0.75
    assert figures["reached_retrieval"] == 1.0
    assert figures["read"] == pytest.approx((7 / 8 + 3 / 8) / 2)
    assert figures["read_labels"] == pytest.approx((6 / 8 + 0) / 2)
    assert figures["volume"] == pytest.approx((1 / 128 + 0.8 + 1 / 128 + 0.3) / 2)
    assert figures["volume_labels"] == pytest.approx((1 / 128 + 0.75) / 2)  # the other group streams
    assert figures["reached_fixed"] == 0.5
    assert figures["volume_fixed"] == pytest.approx(1 / 16 + 2 * 0.05)


def test_a_retrieval_head_taken_for_a_streaming_one_misses_its_target() -> None:
    budgets = np.full((1, 1, 2, 5), 0.25, np.float32)
    samples = Samples(np.zeros((1, 1, 2, 41), np.float32), budgets, budgets[..., 1:], np.array([1024]))
    figures = validate(Fixed(np.array([0.3, 0.3]), np.zeros(2), np.array([0.9, 0.1])), [samples], kv_heads=2)
    assert figures["reached"] == 0.5
    assert figures["streaming_precision"] == 0.0
    assert np.isnan(figures["streaming_recall"])  # there are none to find


def test_prompts_are_split_by_seed_and_source_and_none_is_in_both() -> None:
    sources = ["text"] * 10 + ["prose"] * 5 + ["lone"]
    trained, held_out = split_prompts(sources, CONFIG)
    assert sorted(trained + held_out) == list(range(16))
    assert [sources[index] for index in held_out] == ["text", "text", "prose"]
    assert split_prompts(sources, CONFIG) == (trained, held_out)
    assert any(split_prompts(sources, TrainingConfig(seed=seed))[1] != held_out for seed in range(1, 5))
    assert [len(part) for part in split_prompts(["text"] * 2, TrainingConfig(validation_share=0.9))] == [1, 1]
    assert split_prompts(["text", "prose"], CONFIG) == ([0], [1])


def test_too_little_to_learn_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts=1: must be 2 or more"):
        split_prompts(["text"], CONFIG)
    samples = prompt(0)
    samples.budgets[:] = 0
    with pytest.raises(ConfigError, match="retrieval heads=0 of 72: must be 1 or more"):
        train([samples], CONFIG, silent)
    with pytest.raises(ConfigError, match="prompts=0"):
        validate(Predictor(), [], kv_heads=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("batch_heads", 0), ("learning_rate", 0.0), ("quantile", 1.0), ("validation_share", 0.0)],
)
def test_bad_training_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}: must be"):
        TrainingConfig(**{name: value})
