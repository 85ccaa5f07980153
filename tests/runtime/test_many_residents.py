"""Thousands of requests in and out of scarce frames and slots: they read what was stored, and none stays in use."""

import random
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.memory.host_store import HEAD_DIM, Store
from tests.memory.many_requests import REQUESTS, drive
from tests.memory.pages import numbered
from vllm_hybrid_sparse.memory import transfers
from vllm_hybrid_sparse.memory.block_frames import FrameShape
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.page_keys import NO_PAGE, PageKey, page_numbers
from vllm_hybrid_sparse.memory.transfers import Load, Loader
from vllm_hybrid_sparse.runtime.residency import Residency, ResidentRows
from vllm_hybrid_sparse.values import PAGE_TOKENS

BLOCKS, LAYERS = 64, 2
MOST_FRAMES = 20
CAPACITY = 60 + MOST_FRAMES * LAYERS


def stored(tokens: Sequence[float], layer: int) -> Tensor:
    """The numbers that tokens are in a layer, in float32: no layer's are another's."""
    return torch.tensor(tokens) + layer


class Traffic:
    """Requests that come, decode and leave, at most four at a time; blocks of one page, two layers of one KV head."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = Store(layers=LAYERS, kv_heads=1, blocks=BLOCKS)
        shape = PoolShape(capacity_pages=CAPACITY, layers=LAYERS, head_dim=HEAD_DIM, dtype=torch.float32)
        self.loader = Loader(DevicePool(shape))
        frames = FrameShape(layers=LAYERS, kv_heads=1, pages_per_block=1)
        self.residency = Residency(self.loader, frames, self.store.sources, MOST_FRAMES)
        self.free = deque(range(BLOCKS))
        self.running: list[tuple[list[int], list[float]]] = []  # blocks, and the number that each token is in layer 0
        self.started = self.aborted = self.resident_rows = self.tiered_rows = self.hit_pages = 0

    def start(self) -> None:
        """Prefill: what the blocks held before is forgotten."""
        tokens = [self.rng.random() for _ in range(self.rng.randint(1, 12 * PAGE_TOKENS))]
        blocks = [self.free.popleft() for _ in range(-(-len(tokens) // PAGE_TOKENS))]
        self.forget(blocks)
        for place, block in enumerate(blocks):
            in_block = tokens[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS]
            for layer in range(LAYERS):
                values = stored(in_block, layer)
                keys, rows = self.store._parts(PageKey(layer, 0, block))
                keys[:, : len(values)] = values
                rows[: len(values)] = values[:, None]
        self.running.append((blocks, tokens))
        self.started += 1

    def forget(self, blocks: Sequence[int]) -> None:
        """Something else than decode rows writes these blocks."""
        self.residency.forget(blocks)
        self.loader.forget(numbered([PageKey(layer, 0, block) for layer in range(LAYERS) for block in blocks]))

    def decode(self) -> None:
        """One step: a token for each request, stored where its row is read; what is read is checked."""
        for blocks, tokens in self.running:
            tokens.append(self.rng.random())
            if len(tokens) % PAGE_TOKENS == 1 or len(tokens) == 1:
                blocks.append(self.free.popleft())
            if self.rng.random() < 0.05:
                self.forget(blocks[:1])  # as if a KV connector were about to load what the block holds anyway
        tables = [np.array(blocks, dtype=np.int32) for blocks, _ in self.running]
        divided = self.residency.divide(range(len(tables)), tables, [len(tokens) for _, tokens in self.running])
        for layer in range(LAYERS):
            for blocks, tokens in self.running:
                number = float(stored(tokens[-1:], layer))
                self.store.write(PageKey(layer, 0, blocks[-1]), (len(tokens) - 1) % PAGE_TOKENS, number)
            if not divided.resident.all():
                self.read_slots(layer, np.flatnonzero(~divided.resident).tolist())
            if divided.rows is not None:
                self.read(layer, divided.rows)
            if divided.entering is not None:
                self.residency.enter(layer, divided.entering)

    def read_slots(self, layer: int, rows: Sequence[int]) -> None:
        """Two-tier rows write their tokens into single slots, if they have any, and read as many pages as fit there."""
        tables, texts = zip(*[self.running[row] for row in rows], strict=True)
        ends = np.array([len(tokens) for tokens in texts])
        new = stored([tokens[-1] for tokens in texts], layer)[:, None].expand(-1, HEAD_DIM)
        tails = page_numbers(layer, 0, [blocks[-1] for blocks in tables])
        self.loader.append(tails, (ends - 1) % PAGE_TOKENS, new, new)
        pages = np.full((len(rows), -(-int(ends.max()) // PAGE_TOKENS)), NO_PAGE)
        for of_row, blocks in zip(pages, tables, strict=True):
            of_row[: len(blocks)] = page_numbers(layer, 0, blocks)
        load = Load(source=self.store.sources[layer], pages=pages, unwanted=lambda: np.zeros(len(rows), dtype=np.bool_))
        loaded = self.loader.load(load).result(timeout=30)
        for row in np.flatnonzero(loaded.has_slots).tolist():
            self.check_slots(loaded.slots[row, : len(tables[row])], stored(texts[row], layer))
        self.loader.release(loaded)
        self.tiered_rows += int(loaded.has_slots.sum())
        self.hit_pages += loaded.hit_pages

    def check_slots(self, slots: NDArray[np.int32], tokens: Tensor) -> None:
        for part in (self.loader.pool.key, self.loader.pool.value):
            read = part[torch.from_numpy(slots).long()].flatten(0, 1)[: len(tokens)]
            assert torch.equal(read, tokens[:, None].expand_as(read))

    def read(self, layer: int, rows: ResidentRows) -> None:
        new = stored([self.running[row][1][-1] for row in rows.tokens], layer)
        for part in self.residency.frames(layer):
            part[rows.new_frames, :, rows.new_places] = new[:, None, None]
            for place, row in enumerate(rows.tokens):
                read = part[rows.frames[place].long(), 0].flatten(0, 1)[: rows.seq_lens[place]]
                assert torch.equal(read, stored(self.running[row][1], layer)[:, None].expand_as(read))
        self.resident_rows += len(rows.tokens)

    def leave(self) -> None:
        """Some finish, some are aborted: nobody is told either way."""
        for request in [request for request in self.running if self.rng.random() < 0.3]:
            self.aborted += self.rng.random() < 0.5
            self.running.remove(request)
            (self.free.extend if self.rng.random() < 0.5 else self.free.extendleft)(request[0])

    def check(self) -> None:
        """Frames and pool are sound."""
        self.residency._blocks.check_integrity()
        self.loader.settled().result(timeout=30)
        self.loader.pool.check_integrity()


def test_ten_thousand_requests_read_what_was_stored_and_leave_no_frame_or_slot() -> None:
    threads = threading.active_count()
    traffic = Traffic(seed=0)
    drive(traffic)
    traffic.forget(range(BLOCKS))
    traffic.residency._blocks.check_integrity()
    traffic.residency._give_back()
    traffic.loader.close()
    pool = traffic.loader.pool
    pool.check_integrity()
    assert (pool.layer_slots, pool.resident_pages, pool.pinned_pages) == (CAPACITY, 0, 0)
    assert not traffic.residency.failures
    assert traffic.resident_rows > REQUESTS
    assert traffic.tiered_rows > REQUESTS
    assert traffic.hit_pages > REQUESTS
    assert traffic.aborted > REQUESTS / 3
    assert threading.active_count() == threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(transfers.THREAD_NAME)]
