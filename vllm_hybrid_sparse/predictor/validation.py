"""How good the predictions are on held-out prompts: errors, reached targets, streaming heads, data read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES, GroupBudgets, select_budgets
from vllm_hybrid_sparse.predictor.labels import LABEL_GRANULARITIES, fit_growth, is_streaming
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.predictor.samples import Samples

STREAMING_PROBABILITY = 0.5
"""A head counts as streaming from this probability on. The paper does not name its threshold."""

_FIXED_BUDGET = 0.05


def validate(predictor: Predictor, prompts: Sequence[Samples], kv_heads: int) -> dict[str, float]:
    """Compare predictions with labels, head by head, and let the selector choose from both.

    heads                             number of labels compared: one for each query head of each layer and step
    base_budget_error, growth_error   mean absolute error over the true retrieval heads; shares of the host segment.
                                      Training reduces neither, since it fits the line at the selector's granularities
    budget_error_BLK                  likewise, of bgt(BLK) by eq. 1 against the label itself
    fit_error_BLK                     the part of it that the straight line of eq. 1 costs: the error of the labels' own
                                      line
    streaming_share                   share of all heads that the labels call streaming
    streaming_precision, _recall      of the predicted streaming heads; NaN if there are none
    reached                           share of all heads whose selected budget is at least the least that meets tau (for
                                      a predicted streaming head: whether it is one)
    reached_settled                   likewise for the least budget that meets tau together with all larger ones; the
                                      share of heads that meet tau lies between the two
    reached_retrieval                 `reached` among the heads that the labels call retrieval
    read, read_labels                 mean share of the host segment that a group's heads select together (the sum, at
                                      most 1), by the predictions and by the labels' properties
    volume, volume_labels             mean V(blk) of eq. 3 over 2 L, so including the metadata that is read for ranking
    reached_fixed, volume_fixed       of the paper's strongest baseline: blocks of 16 tokens, a budget of 0.05 per head

    prompts    at least one, otherwise ConfigError
    kv_heads   groups of a layer
    """
    if not prompts:
        raise ConfigError("prompts=0: must be 1 or more to validate on")
    samples = Samples.joined(list(prompts))
    budgets = torch.from_numpy(samples.budgets)
    streaming, growth = is_streaming(budgets).numpy(), fit_growth(budgets).numpy()
    predicted = predictor.predict(torch.from_numpy(samples.features).flatten(0, 2))
    shape = streaming.shape
    base, slope = predicted.base_budget.reshape(shape).numpy(), predicted.growth.reshape(shape).numpy()
    streams = (predicted.streaming >= STREAMING_PROBABILITY).reshape(shape).numpy()
    needed, retrieval = samples.budgets, ~streaming

    figures = {
        "heads": float(streaming.size),
        "base_budget_error": _mean(np.abs(base - needed[..., 0])[retrieval]),
        "growth_error": _mean(np.abs(slope - growth)[retrieval]),
    }
    for index, blk in enumerate(LABEL_GRANULARITIES[1:], start=1):
        line, fitted = (first + k * np.log2(blk) for first, k in ((base, slope), (needed[..., 0], growth)))
        figures[f"budget_error_{blk}"] = _mean(np.abs(np.clip(line, 0, 1) - needed[..., index])[retrieval])
        figures[f"fit_error_{blk}"] = _mean(np.abs(np.clip(fitted, 0, 1) - needed[..., index])[retrieval])
    chosen = _selections(base, slope, streams, samples.host_tokens, kv_heads)
    ideal = _selections(needed[..., 0], growth, streaming, samples.host_tokens, kv_heads)
    reached = _reaches(chosen, needed[..., 1:], samples.host_tokens)
    fixed = _selections(
        np.full_like(base, _FIXED_BUDGET),
        np.zeros_like(base),
        np.zeros_like(streaming),
        samples.host_tokens,
        kv_heads,
        GRANULARITIES[:1],
    )
    return figures | {
        "streaming_share": _mean(streaming),
        "streaming_precision": _mean(streaming[streams]),
        "streaming_recall": _mean(streams[streaming]),
        "reached": _mean(reached),
        "reached_settled": _mean(_reaches(chosen, samples.settled, samples.host_tokens)),
        "reached_retrieval": _mean(reached[retrieval]),
        "read": _share_read(chosen, samples.host_tokens),
        "read_labels": _share_read(ideal, samples.host_tokens),
        "volume": _share_moved(chosen, samples.host_tokens),
        "volume_labels": _share_moved(ideal, samples.host_tokens),
        "reached_fixed": _mean(_reaches(fixed, needed[..., 1:], samples.host_tokens)),
        "volume_fixed": _share_moved(fixed, samples.host_tokens),
    }


def _mean(values: NDArray[np.bool_ | np.floating[Any]]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _selections(
    base: NDArray[np.float32],
    growth: NDArray[np.float32],
    streaming: NDArray[np.bool_],
    host_tokens: NDArray[np.int64],
    kv_heads: int,
    granularities: Sequence[int] = GRANULARITIES,
) -> list[GroupBudgets]:
    """The selector's answer for each step, over the groups of all its layers."""
    shape = (len(host_tokens), base.shape[1] * kv_heads, -1)
    base, growth, streaming = base.reshape(shape), growth.reshape(shape), streaming.reshape(shape)
    return [
        select_budgets(*step[:3], int(step[3]), granularities)
        for step in zip(base, growth, streaming, host_tokens, strict=True)
    ]


def _reaches(
    chosen: list[GroupBudgets], needed: NDArray[np.float32], host_tokens: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether enough blocks are chosen at the granularity chosen, [steps, layers, q_heads]."""
    answers = []
    for step, labels, tokens in zip(chosen, needed, host_tokens, strict=True):
        by_group = labels.reshape(*step.blocks.shape, len(GRANULARITIES))
        index = np.searchsorted(GRANULARITIES, np.maximum(step.granularity, GRANULARITIES[0]))
        wanted = np.take_along_axis(by_group, index[:, None, None], axis=2)[..., 0]
        blk = np.maximum(step.granularity, GRANULARITIES[0])[:, None]
        answers.append((step.blocks >= np.ceil(wanted * tokens / blk - 1e-3)).reshape(labels.shape[:-1]))
    return np.stack(answers)


def _share_read(chosen: list[GroupBudgets], host_tokens: NDArray[np.int64]) -> float:
    shares = [
        np.minimum((step.blocks * step.granularity[:, None]).sum(axis=1) / tokens, 1.0).mean()
        for step, tokens in zip(chosen, host_tokens, strict=True)
    ]
    return float(np.mean(shares))


def _share_moved(chosen: list[GroupBudgets], host_tokens: NDArray[np.int64]) -> float:
    return float(np.mean([step.volume.mean() / (2 * tokens) for step, tokens in zip(chosen, host_tokens, strict=True)]))
