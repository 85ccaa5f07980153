"""Training samples from decode steps of a real model, by teacher forcing through the shipped attention."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.predictor.features import Anchor, attend_retained, decode_features, observe_anchor
from vllm_hybrid_sparse.predictor.labels import label_heads
from vllm_hybrid_sparse.predictor.samples import Samples
from vllm_hybrid_sparse.predictor.segments import Segments, in_compute_dtype
from vllm_hybrid_sparse.values import PAGE_TOKENS, PageRanking, RetainedSet


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Which tokens of a window become anchors and samples (section 7: decode steps drawn at random in each segment)."""

    segment_tokens: int  # a segment's last tokens are its span; > span_tokens
    span_tokens: int  # the anchor is the token before the span, the samples lie in it; >= steps
    steps: int  # sampled decode steps a segment; >= 1

    def positions(self, tokens: int, rng: random.Random) -> list[tuple[int, list[int]]]:
        """(anchor, ascending samples) of each whole segment of a window, as indices of tokens."""
        ends = range(self.segment_tokens, tokens + 1, self.segment_tokens)
        spans = [range(end - self.span_tokens, end) for end in ends]
        return [(span.start - 1, sorted(rng.sample(span, self.steps))) for span in spans]

    def check(self, tokens: int, retained: RetainedSet) -> None:
        """Raise ConfigError unless every window of `tokens` tokens has a segment, and its anchor a candidate."""
        least = retained.sink_tokens + retained.window_tokens + PAGE_TOKENS + self.span_tokens
        for name, value, legal, rule in (
            ("steps", self.steps, 1 <= self.steps <= self.span_tokens, f"1 to span-tokens={self.span_tokens}"),
            ("segment-tokens", self.segment_tokens, least <= self.segment_tokens, f"{least} or more"),
            ("tokens", tokens, tokens >= self.segment_tokens, f"segment-tokens={self.segment_tokens} or more"),
        ):
            if not legal:
                raise ConfigError(f"{name}={value}: must be {rule}")


@torch.inference_mode()
def collect_window(
    model: PreTrainedModel,
    token_ids: Tensor,
    plan: SamplingPlan,
    retained: RetainedSet,
    ranking: PageRanking,
    tau: float,
    attributed: float,
    seed: str,
) -> Samples:
    """Run one window through the model with full attention; return features and labels of its sampled steps.

    token_ids   [tokens] int64
    attributed  share of the unread blocks' estimated weight that labels give to those read, as when serving; 0 if
                bounds rank the blocks
    seed        decides the sampled steps
    ranking     what ranks the blocks; key codes are made and scored by the shipped kernels, without taking out what
                keys have in common: neither split codes nor a device does so when serving
    raises      ConfigError for a model that SparseSession does not serve
    """
    settings = HybridSparseConfig(
        policy="dense",
        summary=ranking.summary,
        code_bits=ranking.code_bits,
        sink_tokens=retained.sink_tokens,
        window_tokens=retained.window_tokens,
    )
    recorder = _Recorder(retained, tau, attributed)
    with SparseSession(model, settings, max_tokens=len(token_ids), watch=recorder.watch, common_keys=False) as session:
        if ranking.summary == "key_codes":
            recorder.page_weights = session.score_candidates
        cache, done = DynamicCache(), 0
        for anchor, samples in plan.positions(len(token_ids), random.Random(seed)):  # noqa: S311 - repeatable
            for position in (anchor, *samples):
                for begin, end in ((done, position), (position, position + 1)):
                    recorder.observes = begin == position and position == anchor
                    recorder.samples = begin == position and position != anchor
                    if begin < end:
                        model(token_ids[None, begin:end], past_key_values=cache, logits_to_keep=1)
                done = position + 1
    return recorder.collected()


class _Recorder:
    """Keeps the anchor of each layer, and the samples."""

    def __init__(self, retained: RetainedSet, tau: float, attributed: float) -> None:
        self.observes = False  # the coming single token is an anchor
        self.samples = False  # or a sample
        self.page_weights: Callable[[int, Tensor], Tensor] | None = None  # of a layer and query; None: bounds rank
        self._retained, self._tau, self._attributed = retained, tau, attributed
        self._anchors: dict[int, Anchor] = {}
        self._features: list[Tensor] = []  # of one layer each, by step and layer
        self._budgets: list[Tensor] = []
        self._settled: list[Tensor] = []
        self._host_tokens: list[int] = []

    def watch(self, step: DecodeStep) -> None:
        """Take in one layer's decode row."""
        if not (self.observes or self.samples):
            return
        page_weights = self.page_weights(step.layer, step.query) if self.page_weights else None
        if self.observes:
            self._anchors[step.layer] = observe_anchor(
                step.query, step.keys, step.values, step.scale, step.layer, self._retained, self._tau, page_weights
            )
            return
        query, keys, values = (in_compute_dtype(tensor) for tensor in (step.query, step.keys, step.values))
        segments = Segments.of(self._retained, keys.shape[1])
        states = attend_retained(query, keys, values, step.scale, segments)
        labels = label_heads(query, keys, values, step.scale, self._retained, self._tau, page_weights, self._attributed)
        self._features.append(decode_features(self._anchors[step.layer], query, step.scale, states, segments))
        self._budgets.append(labels.budgets)
        self._settled.append(labels.settled)
        if step.layer == 0:
            self._host_tokens.append(segments.host_tokens)

    def collected(self) -> Samples:
        """Everything sampled so far."""

        def stacked(parts: list[Tensor]) -> NDArray[np.float32]:
            joined: NDArray[np.float32] = torch.stack(parts).unflatten(0, (len(self._host_tokens), -1)).numpy()
            return joined

        return Samples(
            stacked(self._features),
            stacked(self._budgets),
            stacked(self._settled),
            np.array(self._host_tokens, np.int64),
        )
