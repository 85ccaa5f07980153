"""HGCA's re-evaluation beside a GPU, put off until the request decodes: prompts are only launched, not waited for.

What a prompt's last rows say of the host side is not asked before the first decode step, so their queries are kept,
16 of a request at the most, and the host judges when it has to wait for the stored prompt anyway.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.hgca.native import JudgingRows, reevaluate
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.memory.queues import Mark


class Arriving(NamedTuple):
    """Rows whose queries are in host memory behind a mark."""

    rows: JudgingRows
    mark: Mark


class Judges:
    """The rows that will judge, by layer and slot. For the step's thread alone."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention
        self._waiting: dict[int, dict[int, list[Arriving]]] = {}  # of each request in the order they were appended

    def add(self, layer: int, appended: Sequence[Arriving]) -> None:
        """Keep the latest rows of requests; those of a page that is no longer the last are forgotten."""
        of_layer = self._waiting.setdefault(layer, {})
        for arriving in appended:
            slot = arriving.rows.slot
            earlier = [] if arriving.rows.whole else of_layer.get(slot, [])
            of_layer[slot] = [*earlier, arriving]

    def waiting(self, layer: int) -> list[JudgingRows]:
        """The rows that wait in a layer."""
        return [arriving.rows for of_request in self._waiting.get(layer, {}).values() for arriving in of_request]

    def judge(self, layer: int, states: _native.HgcaLayer, kv_cache: Tensor, slots: Sequence[int]) -> None:
        """Judge the requests in some slots by their rows that wait; the host store has their keys and values."""
        of_layer, appended = self._waiting.get(layer, {}), []
        for of_request in [of_layer.pop(slot) for slot in slots if slot in of_layer]:
            for arriving in of_request:
                arriving.mark.wait()
            parts = [arriving.rows.query for arriving in of_request]
            appended.append(of_request[-1].rows._replace(query=torch.cat(parts)))
        reevaluate(self._attention, states, kv_cache, appended)

    def release(self, slot: int) -> None:
        """Forget the rows of a request that ended, in every layer."""
        for of_layer in self._waiting.values():
            of_layer.pop(slot, None)
