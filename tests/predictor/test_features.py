"""Each feature against its formula in the paper's appendix, for one head at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
import torch
from torch import Tensor

from tests.predictor.cases import RETAINED, SCALE, Layer, random_layer
from vllm_hybrid_sparse.predictor.features import (
    DECODE_FEATURES,
    FEATURES,
    Anchor,
    attend_retained,
    decode_features,
    observe_anchor,
)
from vllm_hybrid_sparse.predictor.labels_reference import attend, least_budgets
from vllm_hybrid_sparse.predictor.segments import Segments

LAYER_INDEX, TAU, TOKENS, NEW_TOKENS = 5, 0.1, 150, 21


@dataclass
class Head:
    """One head's matrices, by the names of appendix A.1; `new` was appended since the anchor."""

    h: int
    group: int
    anchor: Layer
    current: Layer

    def _part(self, layer: Layer, which: str, segment: str) -> Tensor:
        matrix = getattr(layer, which)[self.h // self.group]
        return matrix[getattr(Segments.of(RETAINED, len(matrix)), segment)]

    def key(self, segment: str) -> Tensor:
        return self._part(self.anchor, "keys", segment)

    def value(self, segment: str) -> Tensor:
        return self._part(self.anchor, "values", segment)

    def key_now(self, segment: str) -> Tensor:
        return self._part(self.current, "keys", segment)

    def value_now(self, segment: str) -> Tensor:
        return self._part(self.current, "values", segment)

    @property
    def q(self) -> Tensor:
        return self.current.query[self.h]

    @property
    def q_(self) -> Tensor:
        return self.anchor.query[self.h]

    @cached_property
    def z_(self) -> Tensor:
        return self.key("host") @ self.q_ * SCALE / self.q_.norm()

    @property
    def z_mean(self) -> Tensor:
        return self.q @ self.key("host").mean(0) * SCALE / self.q.norm()

    def budget(self, index: int) -> Tensor:
        return torch.tensor(anchor_budgets(self.group)[self.h][index], dtype=torch.float64)

    def largest(self, layer: Layer) -> Tensor:
        norms = []
        for h, query in enumerate(layer.query):
            head = Head(h, self.group, layer, layer)
            kept = [torch.cat((part("sink"), part("local"))) for part in (head.key, head.value)]
            norms.append(attend(query, *kept, SCALE).norm())
        return torch.stack(norms).max()


def lse(query: Tensor, keys: Tensor) -> Tensor:
    return (keys @ query * SCALE).exp().sum().log()


def skewness(sample: Tensor) -> Tensor:
    return ((sample - sample.mean()) ** 3).mean() / sample.var(correction=0) ** 1.5


def kurtosis(sample: Tensor) -> Tensor:
    return ((sample - sample.mean()) ** 4).mean() / sample.var(correction=0) ** 2


def lengths(head: Head) -> Segments:
    return Segments.of(RETAINED, head.current.keys.shape[1])


FORMULAS: dict[str, Callable[[Head], Tensor | float]] = {
    "layer": lambda _: LAYER_INDEX,
    "head": lambda x: x.h,
    "host_tokens": lambda x: lengths(x).host_tokens,
    "retained_tokens": lambda x: lengths(x).retained_tokens,
    "sink_key_norm": lambda x: x.key("sink").norm(dim=1).mean(),
    "sink_value_norm": lambda x: x.value("sink").norm(dim=1).mean(),
    "mean_key_norm": lambda x: x.key("host").mean(0).norm(),
    "mean_value_norm": lambda x: x.value("host").mean(0).norm(),
    "key_norm_mean": lambda x: x.key("host").norm(dim=1).mean(),
    "key_norm_variance": lambda x: x.key("host").norm(dim=1).var(correction=0),
    "key_norm_skewness": lambda x: skewness(x.key("host").norm(dim=1)),
    "key_norm_kurtosis": lambda x: kurtosis(x.key("host").norm(dim=1)),
    "value_norm_mean": lambda x: x.value("host").norm(dim=1).mean(),
    "value_norm_variance": lambda x: x.value("host").norm(dim=1).var(correction=0),
    "value_norm_skewness": lambda x: skewness(x.value("host").norm(dim=1)),
    "value_norm_kurtosis": lambda x: kurtosis(x.value("host").norm(dim=1)),
    "similarity_mean": lambda x: x.z_mean,
    "anchor_similarity_mean": lambda x: x.z_.mean(),
    "anchor_similarity_variance": lambda x: x.z_.var(correction=0),
    "anchor_similarity_skewness": lambda x: skewness(x.z_),
    "anchor_similarity_kurtosis": lambda x: kurtosis(x.z_),
    "sink_lse": lambda x: lse(x.q, x.key_now("sink")),
    "host_lse": lambda x: (
        torch.tensor(float(lengths(x).host_tokens)).double().log()
        + x.q.norm() * x.z_mean
        + x.q.norm() ** 2 * x.z_.var(correction=0) / 2
    ),
    "local_lse": lambda x: lse(x.q, x.key_now("local")),
    "anchor_sink_lse": lambda x: lse(x.q_, x.key("sink")),
    "anchor_host_lse": lambda x: lse(x.q_, x.key("host")),
    "anchor_local_lse": lambda x: lse(x.q_, x.key("local")),
    "sink_output_norm": lambda x: attend(x.q, x.key_now("sink"), x.value_now("sink"), SCALE).norm(),
    "local_output_norm": lambda x: attend(x.q, x.key_now("local"), x.value_now("local"), SCALE).norm(),
    "anchor_sink_output_norm": lambda x: attend(x.q_, x.key("sink"), x.value("sink"), SCALE).norm(),
    "anchor_host_output_norm": lambda x: attend(x.q_, x.key("host"), x.value("host"), SCALE).norm(),
    "anchor_local_output_norm": lambda x: attend(x.q_, x.key("local"), x.value("local"), SCALE).norm(),
    "query_norm": lambda x: x.q.norm(),
    "anchor_query_norm": lambda x: x.q_.norm(),
    "query_cosine": lambda x: x.q @ x.q_ / (x.q.norm() * x.q_.norm()),
    "anchor_budget_16": lambda x: x.budget(1),
    "anchor_budget_32": lambda x: x.budget(2),
    "anchor_budget_64": lambda x: x.budget(3),
    "anchor_budget_128": lambda x: x.budget(4),
    "largest_output_norm": lambda x: x.largest(x.current),
    "anchor_largest_output_norm": lambda x: x.largest(x.anchor),
}


def layers(group: int, tokens: int) -> tuple[Layer, Layer]:
    """The anchor's query and prefix, and a later query over the whole."""
    whole = random_layer(group, tokens + NEW_TOKENS, seed=group)
    earlier = Layer(whole.query.flip(0) * 0.7, whole.keys[:, :tokens], whole.values[:, :tokens])
    return earlier, whole


@cache
def anchor_budgets(group: int) -> list[list[float]]:
    """The least budgets by head and granularity, for the anchor in the test of the formulas."""
    earlier, _ = layers(group, TOKENS)
    return least_budgets(*earlier, SCALE, RETAINED, TAU)[0]


def features_of(earlier: Layer, current: Layer) -> tuple[Anchor, Tensor]:
    anchor = observe_anchor(*earlier, SCALE, LAYER_INDEX, RETAINED, TAU)
    segments = Segments.of(RETAINED, current.keys.shape[1])
    states = attend_retained(*current, SCALE, segments)
    return anchor, decode_features(anchor, current.query, SCALE, states, segments)


def test_there_are_41_in_the_order_of_the_appendix() -> None:
    assert len(FEATURES) == 41
    assert tuple(FORMULAS) == FEATURES


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_its_formula(name: str, group: int) -> None:
    earlier, current = layers(group, TOKENS)
    _, features = features_of(earlier, current)
    column = features[:, FEATURES.index(name)]
    expected = [float(FORMULAS[name](Head(h, group, earlier, current))) for h in range(2 * group)]
    assert column.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_anchor_leaves_open_what_a_decode_step_computes() -> None:
    anchor, features = features_of(*layers(3, 150))
    open_columns = [FEATURES[index] for index in range(41) if anchor.features[:, index].isnan().any()]
    assert sorted(open_columns) == sorted(DECODE_FEATURES)
    assert features.isfinite().all()


def test_host_lse_is_near_the_true_one_for_normal_similarities() -> None:
    earlier, current = layers(4, 4000)
    current.query[:] = earlier.query + 0.05 * current.query
    _, features = features_of(earlier, current)
    for h in range(8):
        true = float(lse(current.query[h], Head(h, 4, earlier, current).key_now("host")))
        assert float(features[h, FEATURES.index("host_lse")]) == pytest.approx(true, abs=1.0)


@pytest.mark.parametrize("tokens", [1, 10, 16, 40])
def test_short_sequences_have_finite_features_and_empty_segments_zeros(tokens: int) -> None:
    earlier, current = layers(3, tokens)
    anchor, features = features_of(earlier, current)
    assert features.isfinite().all()
    assert not anchor.key_mean.any()
    empty = ["mean_key_norm", "key_norm_kurtosis", "anchor_host_lse", "anchor_host_output_norm", "anchor_budget_128"]
    assert not features[:, [FEATURES.index(name) for name in empty]].any()


def test_bfloat16_gives_the_features_of_its_values() -> None:
    earlier, current = (Layer(*(tensor.bfloat16() for tensor in layer)) for layer in layers(3, 150))
    exact = features_of(*(Layer(*(tensor.double() for tensor in layer)) for layer in (earlier, current)))[1]
    anchor = observe_anchor(*earlier, SCALE, LAYER_INDEX, RETAINED, TAU)
    segments = Segments.of(RETAINED, current.keys.shape[1])
    states = attend_retained(*(tensor.float() for tensor in current), SCALE, segments)
    features = decode_features(anchor, current.query, SCALE, states, segments)
    torch.testing.assert_close(features.double(), exact, rtol=1e-4, atol=1e-4)
