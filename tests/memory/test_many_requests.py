"""Thousands of requests of random lengths with random aborts, in and out of a small pool: nothing is left."""

import random
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from tests.memory.host_store import HEAD_DIM, Store
from tests.memory.many_requests import REQUESTS, drive
from tests.memory.pages import numbered, side_by_side
from vllm_hybrid_sparse.memory import transfers
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.memory.transfers import Load, Loaded, Loader
from vllm_hybrid_sparse.values import PAGE_TOKENS

BLOCKS = 64
CAPACITY = 24


class Traffic:
    """Requests that come, decode a few tokens and finish or are aborted, at most four at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = Store(layers=2, kv_heads=1, blocks=BLOCKS)
        shape = PoolShape(capacity_pages=CAPACITY, layers=2, head_dim=HEAD_DIM, dtype=torch.float32)
        self.loader = Loader(DevicePool(shape))
        self.free = deque(range(BLOCKS))
        self.running: list[list[int]] = []
        self.started = self.aborted = self.stopped = 0

    def start(self) -> None:
        """Prefill a request: its blocks, in any order, are written, and dropped from the pool."""
        blocks = [self.free.popleft() for _ in range(self.rng.randint(1, 12))]
        self.loader.forget(numbered([PageKey(layer, 0, block) for layer in range(2) for block in blocks]))
        self.running.append(blocks)
        self.started += 1

    def decode(self) -> None:
        """One step of every layer: a token each, and two microbatches in flight, some of them no longer wanted."""
        for layer in range(2):
            flying: list[Future[Loaded]] = []
            for blocks in self.running:
                token = torch.zeros(1, HEAD_DIM)
                place = self.rng.randrange(PAGE_TOKENS)
                self.loader.append(numbered([PageKey(layer, 0, blocks[-1])]), np.array([place]), token, token)
                for first in range(0, len(blocks), 4):
                    pages = [PageKey(layer, 0, block) for block in blocks[first : first + 4]]
                    stop = np.array([self.rng.random() < 0.3])
                    self.stopped += int(stop[0])
                    load = Load(
                        source=self.store.sources[layer], pages=side_by_side([pages]), unwanted=partial(np.copy, stop)
                    )
                    if len(flying) == 2:
                        self.land(flying.pop(0))
                    flying.append(self.loader.load(load))
            for future in flying:
                self.land(future)

    def land(self, future: Future[Loaded]) -> None:
        loaded = future.result(timeout=30)
        assert not loaded.errors
        self.loader.release(loaded)

    def leave(self) -> None:
        """Some finish, some are aborted: the pool is not told either way."""
        for blocks in [blocks for blocks in self.running if self.rng.random() < 0.6]:
            self.aborted += self.rng.random() < 0.5
            self.running.remove(blocks)
            self.free.extend(blocks)

    def check(self) -> None:
        """The pool is sound, and nothing is in use."""
        self.loader.settled().result(timeout=30)
        self.loader.pool.check_integrity()
        assert self.loader.pool.pinned_pages == 0


def test_ten_thousand_requests_leave_no_slot_page_pin_or_thread() -> None:
    threads = threading.active_count()
    traffic = Traffic(seed=0)
    drive(traffic)
    pool = traffic.loader.pool
    traffic.loader.forget(numbered([PageKey(layer, 0, block) for layer in range(2) for block in range(BLOCKS)]))
    traffic.loader.close()
    pool.check_integrity()
    assert (pool.resident_pages, pool.pinned_pages) == (0, 0)
    assert len(traffic.free) == BLOCKS
    assert pool.evictions > REQUESTS
    assert traffic.aborted > REQUESTS / 3
    assert traffic.stopped > REQUESTS / 3
    assert threading.active_count() == threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(transfers.THREAD_NAME)]
