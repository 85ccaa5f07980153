"""Compares a layer with Fluxion's states to the reference of every request, step by step."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import Request, ServedLayer, Shape, Step
from tests.tolerances import SCORE_TIE, assert_close
from vllm_hybrid_sparse.kernels.fluxion.native import fluxion_layer, native_predictor
from vllm_hybrid_sparse.kernels.fluxion.reference import (
    FluxionSequence,
    FluxionStep,
    choose_budgets,
    pages_of_blocks,
)
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.features import FEATURES, Anchor
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.predictor.segments import Segments
from vllm_hybrid_sparse.values import PAGE_TOKENS, PageRanking, RetainedSet, SelectionSpec

LAYER_INDEX, TAU = 3, 0.1
BUDGET_COLUMNS = [FEATURES.index(f"anchor_budget_{blk}") for blk in GRANULARITIES]
FEATURE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative to a feature's size, or to 0.05 where it is smaller: a skewness is rarely 0. Weights
and values of two bytes are summed up as such by some instruction sets."""


def some_predictor(shape: Shape, retained: RetainedSet, seed: int = 0) -> Predictor:
    """A random predictor, scaled by the features of such a layer: heads get unlike budgets, and a few stream."""
    return asked_once(_scaled_predictor, replace(shape, dtype=torch.float32, isa="auto"), retained, seed)


def _scaled_predictor(shape: Shape, retained: RetainedSet, seed: int) -> Predictor:
    states = fluxion_layer(native_predictor(constant_predictor(0.5)), layer=LAYER_INDEX, tau=TAU)
    layer = ServedLayer(shape, num_blocks=80, seed=99, fluxion=states)
    requests = [layer.start() for _ in range(3)]
    for slot, request in enumerate(requests):
        request.slot = slot
    layer.step(list(zip(requests, (90, 250, 640), strict=True)), retained=retained)
    rows = []
    for _ in range(6):
        layer.step([(request, 1) for request in requests], retained=retained)
        rows += [layer.attention.last_features(i, head) for i in range(3) for head in range(shape.num_kv_heads)]
    features = torch.cat(rows)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        predictor = Predictor().eval()
        predictor.feature_mean.copy_(features.mean(dim=0))
        predictor.feature_std.copy_(features.std(dim=0) + 1e-2)
        predictor.outputs.bias.zero_()
        outputs = predictor(features)
        predictor.outputs.weight /= outputs.std(dim=0)[:, None]
        predictor.outputs.bias.copy_(-outputs.mean(dim=0) / outputs.std(dim=0))
        predictor.outputs.bias[2] -= 0.8
        predictor.target_mean.copy_(torch.tensor([0.1, 0.005]))
        predictor.target_std.copy_(torch.tensor([0.1, 0.01]))
    return predictor


def constant_predictor(base_budget: float, growth: float = 0.0, *, streams: bool = False) -> Predictor:
    """A predictor that says the same of every head."""
    predictor = Predictor().eval()
    predictor.target_mean.copy_(torch.tensor([base_budget, growth]))
    with torch.no_grad():
        predictor.outputs.weight.zero_()
        predictor.outputs.bias.copy_(torch.tensor([0.0, 0.0, 1.0 if streams else -1.0]))
    return predictor


def decode(
    sequence: FluxionSequence, query: Tensor, keys: Tensor, values: Tensor
) -> tuple[FluxionStep | None, tuple[Anchor | None, int, int, Tensor | None]]:
    """What `sequence.decode` returns, and the state in which it leaves a sequence; this one stays as it is."""
    after = replace(sequence)
    step = after.decode(query, keys, values)
    return step, (after.anchor, after.anchor_tokens, after.tokens, after.last_query)


class MirroredFluxion:
    """Requests get the slots 0, 1, … in the order they start; every step is checked."""

    def __init__(
        self,
        shape: Shape,
        predictor: Predictor,
        retained: RetainedSet,
        *,
        granularity: int = 0,
        num_blocks: int = 64,
        attributed: float = 0.0,
        dense_tokens: int = 0,
        layer: ServedLayer | None = None,
    ) -> None:
        """Give the states to `layer`, which has the same shape, or to a new layer."""
        self.retained, self.predictor = retained, predictor
        self.attributed, self.dense_tokens = attributed, dense_tokens
        codes, self.split = shape.summary in ("key_codes", "split_codes"), shape.summary == "split_codes"
        self.ranking = PageRanking(
            summary="key_codes" if codes else shape.summary, code_bits=shape.code_bits if codes else None
        )
        self.granularities = (granularity,) if granularity else GRANULARITIES
        native = native_predictor(predictor)
        states = fluxion_layer(native, layer=LAYER_INDEX, tau=TAU, granularity=granularity, dense_tokens=dense_tokens)
        self.layer = layer or ServedLayer(shape, num_blocks=num_blocks)
        self.layer.fluxion = states
        self.sequences: dict[int, FluxionSequence] = {}
        self.excuses: list[str] = []  # differences where the reference itself is within rounding of them
        self.anchors_on_a_limit = set[tuple[int, int]]()
        self.pages: list[list[list[int]]] = []  # of the last step, by request and KV head
        self.steps: list[FluxionStep | None] = []

    def start(self) -> Request:
        request = self.layer.start()
        request.slot = next(slot for slot in range(len(self.sequences) + 1) if slot not in self.sequences)
        scale = self.layer.shape.scale
        self.sequences[request.slot] = FluxionSequence(
            self.predictor,
            self.retained,
            TAU,
            LAYER_INDEX,
            scale,
            self.ranking,
            self.granularities,
            self.attributed,
            self.dense_tokens,
            self.split,
        )
        return request

    def release(self, request: Request) -> None:
        assert self.layer.fluxion is not None
        self.layer.finish(request)
        self.layer.fluxion.release(request.slot)
        del self.sequences[request.slot]

    def step(self, *rows: tuple[Request, int], **options: Any) -> Step:
        """Run one step of the layer and compare it with the references. Returns the layer's own result."""
        selection = SelectionSpec(attributed=self.attributed)
        step = self.layer.step(rows, retained=self.retained, selection=selection, **options)
        wanted, first = torch.zeros(step.query.shape, dtype=torch.float64), 0
        self.pages, self.steps = [], []
        for index, (request, length, decodes) in enumerate(
            zip(step.requests, step.query_lens, step.decode_mask, strict=True)
        ):
            if length:
                rows_of = slice(first, first + length)
                wanted[rows_of] = self._expect(index, request, step.query[rows_of], decodes)
            first += length
        assert_close(step.output, wanted)
        return step

    def _expect(self, index: int, request: Request, query: Tensor, decodes: bool) -> Tensor:
        """Compare all that led to the rows' output, and return what that output should be."""
        sequence = self.sequences[request.slot]
        if not decodes:
            sequence.append(query[-1], len(request.key))
            return asked_once(causal_attention, query, request.key, request.value, sequence.scale)
        keys, values = request.key.transpose(0, 1), request.value.transpose(0, 1)
        result, state = asked_once(decode, sequence, query[0], keys, values)
        sequence.anchor, sequence.anchor_tokens, sequence.tokens, sequence.last_query = state
        self.steps.append(result)
        if result is None:
            return asked_once(causal_attention, query, request.key, request.value, sequence.scale)
        assert self.layer.fluxion is not None
        assert self.layer.fluxion.anchor_tokens(request.slot) == sequence.anchor_tokens
        features = self._compare_features(index, request, result)
        chosen = choose_budgets(
            self.predictor, features, len(keys), Segments.of(self.retained, len(request.key)), self.granularities
        )
        rows, out = query[0].reshape(len(keys), -1, query.shape[2]), list[Tensor]()
        self.pages.append([])
        for kv_head in range(len(keys)):
            wanted = int(chosen.granularity[kv_head]), chosen.blocks[kv_head].tolist()
            if (budgets := self.layer.attention.last_budgets(index, kv_head)) != wanted:
                self.excuses.append(f"budgets {budgets}, not {wanted}")
            # With the reference's own budgets, the reference has ranked and attended already.
            own = budgets == (int(result.budgets.granularity[kv_head]), result.budgets.blocks[kv_head].tolist())
            ranked = result.pages[kv_head] if own else None
            pages = self._compare_pages(index, kv_head, sequence, rows[kv_head], keys[kv_head], *budgets, ranked)
            self.pages[-1].append(pages)
            if pages == ranked:
                out.append(result.out.reshape(rows.shape)[kv_head])
            else:
                out.append(sequence.attend(rows[kv_head], keys[kv_head], values[kv_head], pages, *budgets))
        return torch.cat(out)[None]

    def _compare_features(self, index: int, request: Request, result: FluxionStep) -> Tensor:
        """Check that the layer's features [q_heads, 41] are the reference's, and return them."""
        attention = self.layer.attention
        features = torch.cat([attention.last_features(index, head) for head in range(attention.num_kv_heads)])
        size = result.features.abs() + result.features.abs().mean(dim=0)  # it may be a difference of large numbers
        error = (features - result.features).abs() / size.clamp(min=0.05)
        tolerance = FEATURE_TOLERANCE[self.layer.shape.row_dtype]
        if error[:, BUDGET_COLUMNS].max() > tolerance:  # on the limit an error takes a block more or fewer
            self.anchors_on_a_limit.add((request.slot, self.sequences[request.slot].anchor_tokens))
        error[:, BUDGET_COLUMNS] = 0
        assert error.max() < tolerance, {
            FEATURES[column]: (features[row, column].item(), result.features[row, column].item())
            for row, column in (error >= tolerance).nonzero().tolist()
        }
        return features

    def _compare_pages(
        self,
        index: int,
        kv_head: int,
        sequence: FluxionSequence,
        query: Tensor,
        key: Tensor,
        granularity: int,
        blocks: list[int],
        ranked: list[int] | None,
    ) -> list[int]:
        """Check that the pages read are those of the best blocks, and return them.

        ranked   the pages of the best blocks, if known
        """
        segments = Segments.of(self.retained, len(key))
        pages = self.layer.attention.last_plan(index, kv_head)
        if granularity == 0:
            assert not pages
        if granularity == 0 or pages == ranked:
            return pages
        scores, best = sequence.rank(query, key[segments.host], granularity, blocks)
        first_page, size = segments.sink_end // PAGE_TOKENS, granularity // PAGE_TOKENS
        if pages != [
            first_page + page for page in pages_of_blocks(best, granularity, segments.host_tokens // PAGE_TOKENS)
        ]:
            differing = sorted({(page - first_page) // size for page in pages} ^ set(best))
            spread = (scores[:, differing].amax(dim=1) - scores[:, differing].amin(dim=1)).min()
            assert spread < SCORE_TIE * scores.abs().max(), (pages, best)
            self.excuses.append(f"blocks {differing} tie within {spread:.1e}")
        return pages
