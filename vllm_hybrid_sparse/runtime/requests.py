"""Slots of running requests: policies that keep state per request in addition to the KV cache keep it by slot.

Requests may share a KV block, so one request's state cannot lie there. A slot is a small number. A request gets one
when it is first seen and owns it until it is released; then the slot may go to another request. Layers hold their
states in arrays by slot and free a state when they are told to. So no state outlives its request, and there are never
more slots than requests that ran at one time.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError


class SlotStates(Protocol):
    """Keeps states by slot; there is one for each layer."""

    def release(self, slot: int) -> None:
        """Free the state of the slot; it may have none."""


class RequestSlots:
    """The slots of one process. Only the thread that runs the steps writes them."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []  # a heap: the lowest is given first
        self._holders: list[SlotStates] = []
        # By slot: how many tokens of the request the layers' states are for, once the step is done.
        self._tokens: dict[int, int] = {}
        self._batch_ids: Callable[[], Sequence[str]] = list

    def follow(self, batch_ids: Callable[[], Sequence[str]]) -> None:
        """Learn the requests of a step from `batch_ids`, which names them in the order of the batch's rows."""
        self._batch_ids = batch_ids

    def of_batch(self, requests: int) -> Tensor:
        """The slots of the step's requests. KernelError if their number is not `requests`."""
        request_ids = self._batch_ids()
        if len(request_ids) != requests:
            raise KernelError(f"requests={requests}: the step's batch names {len(request_ids)}")
        return self.of(request_ids)

    def advance(self, slots: Tensor, seq_lens: Tensor, query_lens: Tensor) -> Tensor:
        """Record the lengths of a step's requests, once a step, and say which requests have a state that fits.

        slots, seq_lens, query_lens   [requests] int32   tokens of each request, and how many of them are the step's
        returns                       [requests] bool    whether the request's state is for the tokens before the step's
        """
        follows = []
        for slot, seq_len, query_len in zip(slots.tolist(), seq_lens.tolist(), query_lens.tolist(), strict=True):
            follows.append(self._tokens.get(slot) == seq_len - query_len)
            if query_len:
                self._tokens[slot] = seq_len
        return torch.tensor(follows, dtype=torch.bool)

    def attach(self, holder: SlotStates) -> None:
        """Tell `holder` of every release from now on."""
        self._holders.append(holder)

    def of(self, request_ids: Sequence[str]) -> Tensor:
        """The slots of requests. A request without one gets a new one.

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
