"""Which pages a model's decode steps read, and what a device pool makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.accuracy.answers import Prefill
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.values import PageKey

Trace = list[list[list[list[int]]]]
"""[steps][layers][kv_heads][pages]: pages of one request in the order of reading, the retained set first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """What a replay asked of the pool after its first step, which finds it empty."""

    wanted_pages: int
    hit_pages: int
    evicted_pages: int

    @property
    def hit_rate(self) -> float:
        """Share of the pages that were there."""
        return self.hit_pages / self.wanted_pages if self.wanted_pages else float("nan")


def record(prefill: Prefill, decoded: torch.Tensor, settings: HybridSparseConfig) -> Trace:
    """Decode some tokens, the true one fed whatever the model says, and note what each step reads.

    prefill   of all before `decoded`
    decoded   [steps] int64
    """
    trace: Trace = []

    def watch(step: DecodeStep) -> None:
        if step.layer == 0:
            trace.append([])
        retained = settings.retained.retained_pages(step.keys.shape[1])
        trace[-1].append([[*retained, *plan] for plan in step.plans])

    with SparseSession(prefill.model, settings, max_tokens=prefill.max_tokens, watch=watch) as session:
        prefill.rewind(session)
        for token in [prefill.last_token, *decoded[:-1].tolist()]:
            prefill.feed(token)
    return trace


def replay(traces: Sequence[Trace], shape: PoolShape, microbatch_pages: int) -> PoolUse:
    """Serve the requests of some traces side by side, layer after layer, from one pool.

    A microbatch of a group is pinned at a time. Raises CapacityError where the pool does not hold one.
    """
    pool = DevicePool(shape)
    pages_apart = 1 + max(
        page for trace in traces for step in trace for layer in step for head in layer for page in head
    )
    wanted = hits = evicted = 0
    for number, steps in enumerate(zip(*traces, strict=True)):
        if number == 1:
            wanted, hits, evicted = 0, 0, pool.evictions
        for layer in range(shape.layers):
            for request, step in enumerate(steps):
                for head, pages in enumerate(step[layer]):
                    for first in range(0, len(pages), microbatch_pages):
                        some = pages[first : first + microbatch_pages]
                        keys = [PageKey(layer, head, request * pages_apart + page) for page in some]
                        hits += len(keys) - len(pool.take(keys).missing)
                        wanted += len(keys)
                        pool.release(keys)
    pool.check_integrity()
    return PoolUse(wanted_pages=wanted, hit_pages=hits, evicted_pages=pool.evictions - evicted)


def layer_pages(traces: Sequence[Trace]) -> list[float]:
    """Pages that a step reads in each layer, the mean over steps, all requests and KV heads together."""
    layers = len(traces[0][0])
    steps = len(traces[0])
    return [
        sum(len(head) for trace in traces for step in trace for head in step[layer]) / steps for layer in range(layers)
    ]
