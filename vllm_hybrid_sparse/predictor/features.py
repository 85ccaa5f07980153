"""The 41 features of a query head (Fluxion, table 1 and appendix A.1).

`observe_anchor` computes once what is known at the end of the prefill. `decode_features` adds what a decode step knows,
without reading the host segment.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.labels import label_heads
from vllm_hybrid_sparse.predictor.segments import Segments, attend_segment, by_group, in_compute_dtype
from vllm_hybrid_sparse.values import RetainedSet

FEATURE_VERSION: Final = 1
"""Increased whenever a feature changes, so that a predictor of other features is refused."""

FEATURES: Final = (
    # structure, four
    "layer", "head", "host_tokens", "retained_tokens",
    # KV distribution, twelve, of the host segment unless said otherwise
    "sink_key_norm", "sink_value_norm", "mean_key_norm", "mean_value_norm",
    "key_norm_mean", "key_norm_variance", "key_norm_skewness", "key_norm_kurtosis",
    "value_norm_mean", "value_norm_variance", "value_norm_skewness", "value_norm_kurtosis",
    # QK interaction, five
    "similarity_mean",
    "anchor_similarity_mean", "anchor_similarity_variance", "anchor_similarity_skewness", "anchor_similarity_kurtosis",
    # attention contribution, eleven
    "sink_lse", "host_lse", "local_lse", "anchor_sink_lse", "anchor_host_lse", "anchor_local_lse",
    "sink_output_norm", "local_output_norm",
    "anchor_sink_output_norm", "anchor_host_output_norm", "anchor_local_output_norm",
    # query dynamics, three
    "query_norm", "anchor_query_norm", "query_cosine",
    # budget estimation, four
    "anchor_budget_16", "anchor_budget_32", "anchor_budget_64", "anchor_budget_128",
    # across heads, two
    "largest_output_norm", "anchor_largest_output_norm",
)  # fmt: skip
"""Names of the features, in the order of the appendix."""

DECODE_FEATURES: Final = (
    "host_tokens", "retained_tokens", "similarity_mean", "sink_lse", "host_lse", "local_lse",
    "sink_output_norm", "local_output_norm", "query_norm", "query_cosine", "largest_output_norm",
)  # fmt: skip
"""The features that every decode step computes anew; the others are the anchor's."""

_COLUMN: Final = {name: index for index, name in enumerate(FEATURES)}
_DECODE_COLUMNS: Final = torch.tensor([_COLUMN[name] for name in DECODE_FEATURES])
_TINY: Final = 1e-30  # prevents 0 / 0; far below any norm


@dataclass(frozen=True, slots=True)
class RetainedStates:
    """What attention to the retained set says about each query head; the native core computes these states anyway."""

    sink_lse: Tensor  # [q_heads] natural log; -inf if the segment is empty
    sink_output_norm: Tensor  # [q_heads] ||O_sink(q)||; 0 if the segment is empty
    local_lse: Tensor
    local_output_norm: Tensor
    output_norm: Tensor  # [q_heads] ||O~_h(q)||, over both segments together


@dataclass(frozen=True, slots=True)
class Anchor:
    """What one layer keeps of the anchor query q', the last one of the prefill, and of the host segment at that time.

    The paper does not say whether the anchor is ever renewed. Here it may be observed anew at any decode step, which
    costs one dense attention of that query.
    """

    features: Tensor  # [q_heads, 41]; NaN in the columns of DECODE_FEATURES
    query: Tensor  # [q_heads, head_dim]
    key_mean: Tensor  # [kv_heads, head_dim] MEAN(K_cpu); 0 without a host segment


def attend_retained(query: Tensor, keys: Tensor, values: Tensor, scale: float, segments: Segments) -> RetainedStates:
    """Attend to the sink and to the local segment.

    query          [q_heads, head_dim]            f32 | f64
    keys, values   [kv_heads, tokens, head_dim]   same dtype
    """
    sink, sink_lse = attend_segment(query, keys[:, segments.sink], values[:, segments.sink], scale)
    local, local_lse = attend_segment(query, keys[:, segments.local], values[:, segments.local], scale)
    sink_share = torch.sigmoid(sink_lse - local_lse)[:, None]  # an empty segment has -inf, hence no share
    both = sink_share * sink + (1 - sink_share) * local
    return RetainedStates(sink_lse, sink.norm(dim=-1), local_lse, local.norm(dim=-1), both.norm(dim=-1))


def observe_anchor(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    layer: int,
    retained: RetainedSet,
    tau: float,
    page_weights: Tensor | None = None,
) -> Anchor:
    """Everything that the features take from the anchor query and from the prefill's keys and values.

    The appendix writes ||K_sink|| of a matrix, where table 1 counts a mean: here it is the mean of the row norms.
    Variance, skewness and kurtosis are those of the population. The kurtosis of a normal distribution is 3; skewness
    and kurtosis of equal values are 0. D^-1/2 is the softmax scale. The features of an empty segment are 0.

    query          [q_heads, head_dim]            bf16 | f16 | f32, computed in f32; or f64
    keys, values   [kv_heads, tokens, head_dim]   likewise; the anchor's own token is the last one
    layer          index of the layer, from 0
    tau            error of the budget features (eq. 2); > 0, else ConfigError
    page_weights   what ranks the blocks of the budget features, as for `label_heads`
    """
    query, keys, values = (in_compute_dtype(tensor) for tensor in (query, keys, values))
    segments = Segments.of(retained, keys.shape[1])
    host_keys, host_values = keys[:, segments.host], values[:, segments.host]
    states = attend_retained(query, keys, values, scale, segments)
    host_output, host_lse = attend_segment(query, host_keys, host_values, scale)
    query_norm = query.norm(dim=-1)
    similarity = scale * by_group(query, keys.shape[0]) @ host_keys.transpose(1, 2)
    similarity = similarity.flatten(0, 1) / query_norm.clamp(min=_TINY)[:, None]
    key_mean = _mean(host_keys, dim=1)
    per_kv_head = {
        "sink_key_norm": _mean(keys[:, segments.sink].norm(dim=-1), dim=1),
        "sink_value_norm": _mean(values[:, segments.sink].norm(dim=-1), dim=1),
        "mean_key_norm": key_mean.norm(dim=-1),
        "mean_value_norm": _mean(host_values, dim=1).norm(dim=-1),
        **_moments("key_norm", host_keys.norm(dim=-1)),
        **_moments("value_norm", host_values.norm(dim=-1)),
    }
    budgets = label_heads(query, keys, values, scale, retained, tau, page_weights).budgets
    group = query.shape[0] // keys.shape[0]
    columns = {
        "layer": torch.full_like(query_norm, layer),
        "head": torch.arange(query.shape[0], dtype=query.dtype),
        **{name: value.repeat_interleave(group) for name, value in per_kv_head.items()},
        **_moments("anchor_similarity", similarity),
        "anchor_sink_lse": states.sink_lse,
        "anchor_host_lse": host_lse,
        "anchor_local_lse": states.local_lse,
        "anchor_sink_output_norm": states.sink_output_norm,
        "anchor_host_output_norm": host_output.norm(dim=-1),
        "anchor_local_output_norm": states.local_output_norm,
        "anchor_query_norm": query_norm,
        **{f"anchor_budget_{blk}": budgets[:, index] for index, blk in enumerate(GRANULARITIES, start=1)},
        "anchor_largest_output_norm": states.output_norm.max().expand_as(query_norm),
    }
    features = query.new_full((query.shape[0], len(FEATURES)), float("nan"))
    for name, value in columns.items():
        features[:, _COLUMN[name]] = value.nan_to_num(neginf=0.0)
    return Anchor(features, query.clone(), key_mean)


def approximate_host_lse(host_tokens: int, query_norm: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """LSE(s_cpu(q)) from moments (appendix A.1, "Practical note"), exact for normally distributed similarities.

        log L_cpu + ||q|| mu_q + 1/2 ||q||^2 sigma_q^2

    query_norm, mean, variance   [q_heads]: ||q||, and mu_q and sigma_q^2 of z(q)
    returns                      [q_heads]; 0 without a host segment
    """
    if host_tokens == 0:
        return torch.zeros_like(mean)
    log_tokens = torch.tensor(float(host_tokens), dtype=mean.dtype).log()
    return log_tokens + query_norm * mean + 0.5 * query_norm.square() * variance


def decode_features(anchor: Anchor, query: Tensor, scale: float, states: RetainedStates, segments: Segments) -> Tensor:
    """The 41 features of each query head of a layer at one decode step.

    The host segment's moments are the anchor's, even if pages have joined the segment since then. The lengths are
    current.

    query      [q_heads, head_dim]   any floating dtype
    states     those of this query
    returns    [q_heads, 41] of the dtype of the anchor's features; finite
    """
    query = query.to(anchor.features.dtype)
    query_norm = query.norm(dim=-1)
    divisor = query_norm.clamp(min=_TINY)
    products = (by_group(query, anchor.key_mean.shape[0]) * anchor.key_mean[:, None]).sum(dim=-1)
    similarity_mean = scale * products.flatten() / divisor
    anchor_norm = anchor.features[:, _COLUMN["anchor_query_norm"]]
    variance = anchor.features[:, _COLUMN["anchor_similarity_variance"]]
    current = {
        "host_tokens": torch.full_like(query_norm, segments.host_tokens),
        "retained_tokens": torch.full_like(query_norm, segments.retained_tokens),
        "similarity_mean": similarity_mean,
        "sink_lse": states.sink_lse,
        "host_lse": approximate_host_lse(segments.host_tokens, query_norm, similarity_mean, variance),
        "local_lse": states.local_lse,
        "sink_output_norm": states.sink_output_norm,
        "local_output_norm": states.local_output_norm,
        "query_norm": query_norm,
        "query_cosine": (query * anchor.query).sum(dim=-1) / (divisor * anchor_norm.clamp(min=_TINY)),
        "largest_output_norm": states.output_norm.max().expand_as(query_norm),
    }
    columns = torch.stack([current[name] for name in DECODE_FEATURES], dim=1)
    features = anchor.features.clone()
    features[:, _DECODE_COLUMNS] = columns.nan_to_num(neginf=0.0)
    return features


def _mean(tensor: Tensor, dim: int) -> Tensor:
    """The mean; 0 of nothing."""
    return tensor.sum(dim=dim) / max(tensor.shape[dim], 1)


def _moments(name: str, sample: Tensor) -> dict[str, Tensor]:
    """Mean, variance, skewness and kurtosis over the last dimension."""
    mean = _mean(sample, dim=-1)
    centred = sample - mean[..., None]
    variance = _mean(centred.square(), dim=-1)
    deviation = variance.sqrt().clamp(min=_TINY)
    return {
        f"{name}_mean": mean,
        f"{name}_variance": variance,
        f"{name}_skewness": _mean((centred / deviation[..., None]) ** 3, dim=-1),
        f"{name}_kurtosis": _mean((centred / deviation[..., None]) ** 4, dim=-1),
    }
