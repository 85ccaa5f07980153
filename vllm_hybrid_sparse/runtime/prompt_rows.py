"""Keeps the prompt rows that a policy looks back at, until their request decodes.

On a GPU prompts are only launched, not waited for. HGCA judges its host side by a prompt's last page of rows, and
Fluxion makes its last query the anchor; neither is needed before the first decode step. So these queries are kept, at
most 16 per request, and the host looks at them when it has to wait for the stored prompt anyway.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_hybrid_sparse.kernels.latest_rows import LatestRows
from vllm_hybrid_sparse.memory.queues import Mark


class Arriving(NamedTuple):
    """Rows whose queries are in host memory once the mark has passed."""

    rows: LatestRows
    mark: Mark


class PromptRows:
    """The rows that wait, by layer and slot. Only for the step's thread."""

    def __init__(self, wanted: Callable[[int], int]) -> None:
        """Nothing waits. `wanted` says, for a request's tokens, how many of its latest rows are looked at."""
        self.wanted = wanted
        self._waiting: dict[int, dict[int, list[Arriving]]] = {}  # of each request in the order they were appended

    def add(self, layer: int, appended: Sequence[Arriving]) -> None:
        """Keep the latest rows of requests. If they are all that is wanted, earlier ones are forgotten."""
        of_layer = self._waiting.setdefault(layer, {})
        for arriving in appended:
            slot, rows = arriving.rows.slot, arriving.rows
            earlier = [] if len(rows.query) == self.wanted(rows.seq_len) else of_layer.get(slot, [])
            of_layer[slot] = [*earlier, arriving]

    def waiting(self, layer: int) -> list[LatestRows]:
        """The rows that wait in a layer."""
        return [arriving.rows for of_request in self._waiting.get(layer, {}).values() for arriving in of_request]

    def take(self, layer: int, slots: Sequence[int]) -> list[LatestRows]:
        """Take the rows of the requests in some slots, once they are there; all of a request together."""
        of_layer, taken = self._waiting.get(layer, {}), []
        for of_request in [of_layer.pop(slot) for slot in slots if slot in of_layer]:
            for arriving in of_request:
                arriving.mark.wait()
            parts = [arriving.rows.query for arriving in of_request]
            taken.append(of_request[-1].rows._replace(query=torch.cat(parts)))
        return taken

    def release(self, slot: int) -> None:
        """Forget the rows of a request that ended, in every layer."""
        for of_layer in self._waiting.values():
            of_layer.pop(slot, None)
