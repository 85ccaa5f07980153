"""Compares a layer with HGCA's state to the reference of every request and KV head, step by step."""

from typing import Any

import torch
from torch import Tensor

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import Request, ServedLayer, Shape, Step
from tests.tolerances import WEIGHT_TIE, assert_close
from vllm_hybrid_sparse.kernels.hgca.reference import HgcaHead
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec


class MirroredLayer:
    """Requests get the slots 0, 1, … in the order they start; every step is checked."""

    def __init__(
        self,
        shape: Shape,
        salience: SalienceSpec,
        retained: RetainedSet,
        *,
        num_blocks: int = 64,
        layer: ServedLayer | None = None,
    ) -> None:
        """Check `layer`, which was made for the same arguments, or a new layer."""
        self.salience, self.retained = salience, retained
        self.layer = layer or ServedLayer(shape, num_blocks=num_blocks, salience=salience, retained=retained)
        self.heads: dict[int, list[HgcaHead]] = {}
        self.tokens: dict[int, int] = {}

    def start(self) -> Request:
        request = self.layer.start()
        request.slot = next(slot for slot in range(len(self.heads) + 1) if slot not in self.heads)
        scale = self.layer.shape.scale
        self.heads[request.slot] = [
            HgcaHead(self.salience, self.retained, scale) for _ in range(self.layer.shape.num_kv_heads)
        ]
        self.tokens[request.slot] = 0
        return request

    def release(self, request: Request) -> None:
        assert self.layer.hgca is not None
        self.layer.finish(request)
        self.layer.hgca.release(request.slot)
        del self.heads[request.slot], self.tokens[request.slot]

    def step(self, *rows: tuple[Request, int], **options: Any) -> Step:
        """Run one step of the layer and compare it with the references. Returns the layer's own result."""
        step = self.layer.step(rows, **options)
        wanted = torch.zeros(step.query.shape, dtype=torch.float64)
        first = 0
        for request, length, decodes in zip(step.requests, step.query_lens, step.decode_mask, strict=True):
            if length:
                wanted[first : first + length] = self._expect(request, step.query[first : first + length], decodes)
            first += length
        assert_close(step.output, wanted)
        return step

    def _expect(self, request: Request, query: Tensor, decodes: bool) -> Tensor:
        """Compare the state, and return what the rows' output should be."""
        shape, tokens = self.layer.shape, len(request.key)
        sparse = decodes and self.tokens[request.slot] == tokens - 1
        rows = query.unflatten(1, (shape.num_kv_heads, -1))
        out = [] if sparse else [asked_once(causal_attention, query, request.key, request.value, shape.scale)]
        for kv_head, head in enumerate(self.heads[request.slot]):
            key, value = request.key[:, kv_head], request.value[:, kv_head]
            if sparse:
                head.evict(tokens)
                self._compare_salient(request, kv_head, head)
                out.append(head.decode(rows[0, kv_head], key, value)[None])
            else:
                head.append(rows[:, kv_head], key)
                self._compare_salient(request, kv_head, head)
            self._compare_averages(request, kv_head, head)
        self.tokens[request.slot] = tokens
        return torch.cat(out, dim=1)

    def _compare_salient(self, request: Request, kv_head: int, head: HgcaHead) -> None:
        """Check that entries and their order agree. Those on the limit may differ; the layer's judgement counts."""
        assert self.layer.hgca is not None
        packed = self.layer.hgca.salient(request.slot, kv_head)
        for position in set(packed) ^ set(head.salient):
            assert abs(head.judged.get(position, 0.0) - 1) < WEIGHT_TIE, (position, head.judged.get(position))
        assert [p for p in packed if p in head.salient] == [p for p in head.salient if p in packed]
        head.salient = packed

    def _compare_averages(self, request: Request, kv_head: int, head: HgcaHead) -> None:
        assert self.layer.hgca is not None
        tokens = len(request.key)
        recent = head.averages[:, head.host_range(tokens)[1] :]
        kept = torch.tensor(self.layer.hgca.averages(request.slot, kv_head), dtype=torch.float64)
        torch.testing.assert_close(kept, recent.flatten(), rtol=WEIGHT_TIE, atol=1e-7)
