"""Which slot each running request has: policies that keep state of a request beside its KV cache keep it by slot.

A KV block may be shared by requests, so what is of one request cannot lie there. A slot is a small number that is given
when a request is first seen, is its own until the request is released, and is then given again. Layers hold their
states in arrays by slot and free a state when they are told; so nothing of a request outlives it, and there are never
more slots than requests that ran at one time.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError


class SlotStates(Protocol):
    """What keeps states by slot: one for each layer."""

    def release(self, slot: int) -> None:
        """Free the state of the slot; it may have none."""


class RequestSlots:
    """The slots of one process. Its one writer is the thread that runs the steps."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []  # a heap: the lowest is given first
        self._holders: list[SlotStates] = []
        self._tokens: dict[
            int, int
        ] = {}  # by slot: of the sequence that the layers' states are for, once the step is done
        self._batch_ids: Callable[[], Sequence[str]] = list

    def follow(self, batch_ids: Callable[[], Sequence[str]]) -> None:
        """Learn the requests of a step from `batch_ids`, which names them in the order of the batch's rows."""
        self._batch_ids = batch_ids

    def of_batch(self, requests: int) -> Tensor:
        """The slots of the step's requests, of which there must be so many. KernelError where it names others."""
        request_ids = self._batch_ids()
        if len(request_ids) != requests:
            raise KernelError(f"requests={requests}: the step's batch names {len(request_ids)}")
        return self.of(request_ids)

    def advance(self, slots: Tensor, seq_lens: Tensor, query_lens: Tensor) -> Tensor:
        """Say once of a step how long its requests are, for a runtime that has to know which of them have a state.

        slots, seq_lens, query_lens   [requests] int32   tokens of each request, and of them those of the step
        returns                       [requests] bool    whether the request's state is for the tokens before the step's
        """
        follows = []
        for slot, seq_len, query_len in zip(slots.tolist(), seq_lens.tolist(), query_lens.tolist(), strict=True):
            follows.append(self._tokens.get(slot) == seq_len - query_len)
            if query_len:
                self._tokens[slot] = seq_len
        return torch.tensor(follows, dtype=torch.bool)

    def attach(self, holder: SlotStates) -> None:
        """Have `holder` told of every release from now on."""
        self._holders.append(holder)

    def of(self, request_ids: Sequence[str]) -> Tensor:
        """The slots of requests, new ones where they have none.

        returns   [requests] int32, on the CPU; empty for none
        """
        slots = []
        for request_id in request_ids:
            if request_id not in self._slots:
                self._slots[request_id] = heapq.heappop(self._free) if self._free else len(self._slots)
            slots.append(self._slots[request_id])
        return torch.tensor(slots, dtype=torch.int32)

    def release(self, request_ids: Iterable[str]) -> None:
        """Free the slots and states of requests that finished, were aborted or preempted; unknown ones have none."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is None:
                continue
            self._tokens.pop(slot, None)
            for holder in self._holders:
                holder.release(slot)
            heapq.heappush(self._free, slot)

    def __len__(self) -> int:
        return len(self._slots)
