"""Queues that know what happens before what, and notice work that may overlap with work it must not overlap with.

On a GPU, a missing `follow` shows as answers that are wrong now and then. Here it is an error every time. Every queue
has a vector clock (Fidge, Mattern, 1988), and a mark is a copy of one. A wait for a mark counts
for all host threads: what they launch later is behind it. Kernels are told apart by what they read and write: a slot,
an area, a page.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm_hybrid_sparse.memory import cuda_pool, write_through
from vllm_hybrid_sparse.runtime import (
    cuda,
    cuda_layer,
    gpu_ranking,
    predicted_rows,
    prefill,
    ranking,
    residency,
    step,
    tiers,
)
from vllm_hybrid_sparse.values import PAGE_TOKENS

Clock = dict[int, int]  # by queue: how much of its work came before


def _join(clock: Clock, other: Clock) -> None:
    for queue, count in other.items():
        clock[queue] = max(clock.get(queue, 0), count)


class Machine:
    """All queues of a test, and who accessed what memory last."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.races: list[str] = []
        self.accesses = 0
        self._lock = threading.RLock()
        self._launching = threading.local()
        self._caller = ClockedQueue(self, 0)
        self._queues = [self._caller]
        self._last: dict[Hashable, list[tuple[str, int, int]]] = {}  # by memory and kind: (name, queue, count)

    def open_queue(self, device: torch.device) -> "ClockedQueue":
        assert device.type == "cpu"
        self._queues.append(ClockedQueue(self, len(self._queues)))
        return self._queues[-1]

    def current_queue(self, device: torch.device) -> "ClockedQueue":
        assert device.type == "cpu"
        stack = getattr(self._launching, "stack", None)
        return stack[-1] if stack else self._caller

    @contextmanager
    def launching(self, queue: "ClockedQueue") -> Iterator[None]:
        stack = self._launching.stack = getattr(self._launching, "stack", [])
        stack.append(queue)
        yield
        stack.pop()

    def launch(self, name: str, reads: list[Hashable], writes: list[Hashable]) -> None:
        """Note one kernel, and whether it comes after all that touched its memory before."""
        with self._lock:
            queue = self.current_queue(torch.device("cpu"))
            _join(queue.clock, self.host)
            queue.clock[queue.index] = queue.clock.get(queue.index, 0) + 1
            entry = (name, queue.index, queue.clock[queue.index])
            self.accesses += 1
            for memory in writes:
                self._check(name, queue.clock, memory, "write", "read")
                self._last[memory, "write"], self._last[memory, "read"] = [entry], []
            for memory in reads:
                self._check(name, queue.clock, memory, "write")
                self._last.setdefault((memory, "read"), []).append(entry)

    def host_reads(self, memories: list[Hashable]) -> None:
        """Note that the host reads some memory."""
        with self._lock:
            for memory in memories:
                self._check("the host", self.host, memory, "write")

    def _check(self, name: str, clock: Clock, memory: Hashable, *kinds: str) -> None:
        for kind in kinds:
            for other, queue, count in self._last.get((memory, kind), []):
                if clock.get(queue, 0) < count:
                    self.races.append(f"{name} may run beside {other}, which {kind}s {memory}")


class ClockedMark:
    """A copy of a queue's clock."""

    def __init__(self, machine: Machine, clock: Clock) -> None:
        self._machine, self.clock = machine, clock

    def wait(self) -> None:
        with self._machine._lock:
            _join(self._machine.host, self.clock)

    def passed(self) -> bool:
        self.wait()
        return True

    def seconds_since(self, _earlier: "ClockedMark") -> float:
        return 1e-6


class ClockedQueue:
    """A `DeviceQueue` whose work is done at once and counts as done only for those who know of it."""

    def __init__(self, machine: Machine, index: int) -> None:
        self.device = torch.device("cpu")
        self.index, self.clock = index, Clock()
        self._machine = machine

    def launching(self) -> Any:
        return self._machine.launching(self)

    def mark(self) -> ClockedMark:
        with self._machine._lock:
            return ClockedMark(self._machine, dict(self.clock))

    def follow(self, mark: ClockedMark) -> None:
        with self._machine._lock:
            _join(self.clock, mark.clock)

    def keep(self, *tensors: torch.Tensor) -> None:
        assert tensors


def watch(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Replace the CUDA device's queues with clocked ones, and watch its kernels."""
    machine = Machine()
    for module in (cuda, cuda_layer, tiers):
        monkeypatch.setattr(module, "open_queue", machine.open_queue)
    for module in (cuda, cuda_layer, prefill, ranking, residency, write_through):
        monkeypatch.setattr(module, "current_queue", machine.current_queue)

    def wrap(module: Any, name: str, memory: Callable[..., tuple[list[Hashable], list[Hashable]]]) -> None:
        kernel = getattr(module, name)

        def watched(*given: Any, **named: Any) -> Any:
            machine.launch(name, *memory(*given, **named))
            return kernel(*given, **named)

        monkeypatch.setattr(module, name, watched)

    def pages(host: Any, offsets: Any) -> list[Hashable]:
        return [("page", host.data_ptr(), offset) for offset in offsets.flatten().tolist() if offset >= 0]

    def read_by_host(source: Any, table: Any, seq_len: int) -> None:
        heads, page = torch.arange(source.num_kv_heads)[:, None], torch.arange(-(-seq_len // PAGE_TOKENS))
        of_block = source.pages_per_block
        stored_at = table[page // of_block].long() * of_block + page % of_block
        machine.host_reads(pages(source.elements, source.offsets(heads, stored_at[None])))

    def slots(pool: Any, places: Any) -> list[Hashable]:
        return [("slot", pool.data_ptr(), slot) for slot in places.flatten().tolist() if slot >= 0]

    def area(pool: Any) -> list[Hashable]:
        return [("area", pool.data_ptr())]

    wrap(cuda_pool, "load_pages", lambda host, at, to, key, _: (pages(host, at), slots(key, to)))
    wrap(prefill, "load_pages", lambda host, at, _to, key, _: (pages(host, at), area(key)))
    wrap(prefill, "attend_dense", lambda _query, key, *_, causal, **__: ([] if causal else area(key), []))
    wrap(write_through, "store_pages", lambda host, at, *_: ([], pages(host, at)))

    def in_frames(frames: Any, numbers: Any) -> list[Hashable]:
        """Slots of one layer's part of frames."""
        page_bytes = PAGE_TOKENS * frames.shape[-1] * frames.element_size()
        first = (frames.data_ptr() - frames.untyped_storage().data_ptr()) // page_bytes
        of_frame = frames.stride(0) * frames.element_size() // page_bytes
        of_layer = torch.arange(frames.shape[1] * frames.shape[2] // PAGE_TOKENS)
        pool = frames.untyped_storage()
        return slots(pool, first + numbers.flatten().long()[:, None] * of_frame + of_layer)

    def stored_tokens(host: Any, at: Any, _tokens: Any, key: Any, _value: Any, frames: Any = None) -> Any:
        framed = [] if frames is None else in_frames(frames.key, frames.numbers)
        return [("given", key.untyped_storage().data_ptr())] if framed else [], pages(host, at) + framed

    def read_frames(_query: Any, key: Any, _value: Any, numbers: Any, lengths: Any, *_: Any, **__: Any) -> Any:
        held = [row[: -(-length // key.shape[2])] for row, length in zip(numbers, lengths.tolist(), strict=True)]
        return in_frames(key, torch.cat(held)), []

    wrap(write_through, "store_tokens", stored_tokens)
    wrap(cuda, "attend_frames", read_frames)

    def at_pages(host: Any, heads: Any, at: Any) -> list[Hashable]:
        block, page = at // host.pages_per_block, at % host.pages_per_block
        return pages(host.elements, block * host.block_stride + heads * host.head_stride + page * host.page_stride)

    def read_listed(_query: Any, key: Any, _value: Any, host: Any, listed: Any, counts: Any, *_: Any, **__: Any) -> Any:
        is_listed = torch.arange(listed.slots.shape[2]) < counts[..., None]
        heads = torch.arange(counts.shape[1])[:, None].expand_as(listed.slots)[is_listed]
        slot, page = listed.slots[is_listed], listed.pages[is_listed].long()
        reads = slots(key, slot) + at_pages(host, heads[slot < 0], page[slot < 0])
        return reads, slots(key, -2 - slot)

    def places(codes: Any, at: Any) -> list[Hashable]:
        return [("codes", codes.data_ptr(), place) for place in at.flatten().tolist()]

    def scored(_queries: Any, codes: Any, blocks: Any, candidates: Any, *, first_page: int, **named: Any) -> Any:
        of_block, at = named["pages_per_block"], []
        for table, num in zip(blocks, candidates.tolist(), strict=True):
            page = first_page + torch.arange(num)
            at.append(table[page // of_block].long() * of_block + page % of_block)
        heads = torch.arange(len(codes))[:, None] * codes.shape[1]
        return places(codes, heads + torch.cat(at)), []

    wrap(gpu_ranking, "attend_listed", read_listed)
    wrap(gpu_ranking, "encode_pages", lambda host, at, to, codes, **_: (pages(host, at), places(codes, to)))
    wrap(gpu_ranking, "score_codes", scored)

    def states(out: torch.Tensor) -> list[Hashable]:
        return [("states", out.data_ptr())]

    def attended(_query: Any, key: Any, _value: Any, places: Any, *given: Any, **_: Any) -> Any:
        return slots(key, places), states(given[2])  # page_tokens, done, out

    wrap(cuda, "attend_slots", attended)
    brought, choose_pages = cuda.CudaDevice.brought, predicted_rows.choose_pages
    held = dict[int, int]()  # from the address of a copy in host memory to that of the original

    def watched_bringing(self: Any, *parts: Any) -> Any:
        with self._queue.launching():
            for part in parts:
                machine.launch("bring", states(part.out), [("held", part.out.data_ptr())])
        copies = brought(self, *parts)
        held.update({copy.out.data_ptr(): part.out.data_ptr() for copy, part in zip(copies, parts, strict=True)})
        return copies

    def choosing(*given: Any) -> Any:
        machine.host_reads([("held", held[out.data_ptr()]) for out, _ in given[-2:]])
        return choose_pages(*given)

    monkeypatch.setattr(cuda.CudaDevice, "brought", watched_bringing)
    monkeypatch.setattr(predicted_rows, "choose_pages", choosing)

    store, layer_forward = cuda_layer.CudaLayers._store, cuda_layer.CudaLayers.forward

    def watched_store(self: Any, writer: Any, key: Any, *given: Any) -> None:
        store(self, writer, key, *given)
        with self._queue.launching():
            machine.launch("store", [("given", key.data_ptr())], [])

    def in_a_graph(self: Any, query: Any, key: Any, *given: Any) -> None:
        layer_forward(self, query, key, *given)
        written: list[Hashable] = [("given", address) for address in {key.data_ptr(), key.untyped_storage().data_ptr()}]
        machine.launch("the next piece of the graph", [], written)

    monkeypatch.setattr(cuda_layer.CudaLayers, "_store", watched_store)
    monkeypatch.setattr(cuda_layer.CudaLayers, "forward", in_a_graph)
    put_tokens = cuda_pool.CudaPool.put_tokens

    def watched_put(self: Any, places: Any, *given: Any) -> None:
        with self.queue.launching():
            machine.launch("put_tokens", [], slots(self.key, places))
        put_tokens(self, places, *given)

    monkeypatch.setattr(cuda_pool.CudaPool, "put_tokens", watched_put)
    forward = step.TieredLayer.forward

    def on_host(
        self: Any, query: Any, key: Any, value: Any, kv_cache: Any, batch: Any, *given: Any, **named: Any
    ) -> None:
        for table, seq_len in zip(batch.block_tables, batch.seq_lens, strict=True):
            read_by_host(self._tier.source(kv_cache), table, seq_len)
        forward(self, query, key, value, kv_cache, batch, *given, **named)

    monkeypatch.setattr(step.TieredLayer, "forward", on_host)
    settle, reevaluate, sources = cuda_layer.CudaLayers._settle, cuda_layer.reevaluate, dict[int, Any]()

    def settled(self: Any, kv_cache: Any, stored: Any) -> None:
        sources[kv_cache.data_ptr()] = self._tier.source(kv_cache)
        settle(self, kv_cache, stored)

    def judging(attention: Any, states: Any, kv_cache: Any, appended: Any) -> None:
        for rows in appended:
            read_by_host(sources[kv_cache.data_ptr()], rows.block_table, rows.seq_len)
        reevaluate(attention, states, kv_cache, appended)

    monkeypatch.setattr(cuda_layer.CudaLayers, "_settle", settled)
    monkeypatch.setattr(cuda_layer, "reevaluate", judging)
    return machine
