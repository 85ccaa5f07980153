"""Random operations on a pool, its loader and a host store, as requests cause them: nothing stale, nothing lost."""

from concurrent.futures import Future

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.memory.host_store import HEAD_DIM, Store
from tests.memory.pages import numbered, side_by_side
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.memory.transfers import Load, Loaded, Loader
from vllm_hybrid_sparse.values import PAGE_TOKENS

LAYERS, KV_HEADS, BLOCKS = 2, 2, 10


class PoolStates(RuleBasedStateMachine):
    """Requests own blocks of one page each, some shared with the request they were forked from."""

    @initialize(capacity=st.integers(2, 24), unified=st.booleans(), eviction=st.sampled_from(["cyclic", "lru", "fifo"]))
    def begin(self, capacity: int, unified: bool, eviction: str) -> None:
        self.store = Store(layers=LAYERS, kv_heads=KV_HEADS, blocks=BLOCKS)
        shape = PoolShape(
            capacity_pages=capacity,
            layers=LAYERS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            eviction=eviction,
            unified=unified,
        )
        self.pool = DevicePool(shape)
        self.loader = Loader(self.pool)
        self.free = list(range(BLOCKS))
        self.users: dict[int, int] = {}  # number of users of each block in use
        self.requests: list[tuple[list[int], int]] = []  # blocks, tokens
        self.flying: list[tuple[list[list[PageKey]], Future[Loaded]]] = []
        self.clock = 0.0
        self.truth: dict[tuple[PageKey, int], float] = {}

    def heads(self, block: int) -> list[PageKey]:
        return [PageKey(layer, head, block) for layer in range(LAYERS) for head in range(KV_HEADS)]

    def write(self, block: int, offset: int) -> list[float]:
        """Store one new token in all layers and heads; return its numbers in the order of `heads`."""
        numbers = []
        for key in self.heads(block):
            self.clock += 1
            self.store.write(key, offset, self.clock)
            self.truth[key, offset] = self.clock
            numbers.append(self.clock)
        return numbers

    def settle(self) -> None:
        """A step waits for its loads before the host store is written again."""
        for parts, future in self.flying:
            loaded = future.result(timeout=10)
            for part, keys in enumerate(parts):
                assert (loaded.slots[part] >= 0).sum() in (0, len(keys))
            self.loader.release(loaded)
        self.flying.clear()

    def chosen(self, data: st.DataObject) -> tuple[list[int], int]:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Prefill a new request; its blocks may have been another's."""
        self.settle()
        tokens = data.draw(st.integers(1, PAGE_TOKENS * min(3, len(self.free))))
        blocks = [self.free.pop(0) for _ in range(-(-tokens // PAGE_TOKENS))]
        for position in range(tokens):
            self.write(blocks[position // PAGE_TOKENS], position % PAGE_TOKENS)
        self.loader.forget(numbered([key for block in blocks for key in self.heads(block)]))
        self.users.update(dict.fromkeys(blocks, 1))
        self.requests.append((blocks, tokens))

    @precondition(lambda self: any(tokens >= PAGE_TOKENS for _, tokens in self.requests))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Start another request that shares the full pages of one."""
        whole = [request for request in self.requests if request[1] >= PAGE_TOKENS]
        blocks, tokens = whole[data.draw(st.integers(0, len(whole) - 1))]
        shared = blocks[: tokens // PAGE_TOKENS]
        for block in shared:
            self.users[block] += 1
        self.requests.append((list(shared), PAGE_TOKENS * len(shared)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """Decode one token and write it through to where its page lies."""
        self.settle()
        blocks, tokens = request = self.chosen(data)
        if tokens % PAGE_TOKENS == 0:
            if not self.free:
                return
            blocks.append(self.free.pop(0))
            self.users[blocks[-1]] = 1
        block, offset = blocks[tokens // PAGE_TOKENS], tokens % PAGE_TOKENS
        numbers = torch.tensor(self.write(block, offset))[:, None].expand(-1, HEAD_DIM)
        self.loader.append(numbered(self.heads(block)), np.full(len(numbers), offset), numbers, numbers)
        self.requests[self.requests.index(request)] = (blocks, tokens + 1)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request finishes, is aborted or preempted: its blocks are free for others, and nobody tells the pool."""
        request = self.chosen(data)
        self.requests.remove(request)
        for block in request[0]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(0, block)
                for key in self.heads(block):
                    for offset in range(PAGE_TOKENS):
                        self.truth.pop((key, offset), None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), together=st.booleans())
    def load(self, data: st.DataObject, layer: int, together: bool) -> None:
        """Ask for pages of some requests, together with other loads or after them."""
        if not together or (self.flying and self.flying[0][0][0][0].layer != layer):
            self.settle()
        parts = []
        for head in range(KV_HEADS):
            blocks = self.chosen(data)[0]
            part = data.draw(st.lists(st.sampled_from(blocks), min_size=1, unique=True))
            parts.append([PageKey(layer, head, block) for block in part])
        unwanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts))))
        load = Load(source=self.store.sources[layer], pages=side_by_side(parts), unwanted=lambda: unwanted)
        self.flying.append((parts, self.loader.load(load)))

    @invariant()
    def nothing_is_stale_or_lost(self) -> None:
        if not hasattr(self, "loader"):
            return
        self.loader.settled().result(timeout=10)  # the loader has done all that it was asked for
        self.pool.check_integrity()
        keys = list({key for key, _ in self.truth})
        slots = self.pool.slots_of(numbered(keys)).tolist()
        resident = {key: slot for key, slot in zip(keys, slots, strict=True) if slot >= 0}
        for (key, offset), number in self.truth.items():
            if key in resident:
                assert self.pool.key[resident[key], offset].eq(number).all(), f"{key} token {offset} is stale"
                assert self.pool.value[resident[key], offset].eq(number).all(), f"{key} token {offset} is stale"

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.settle()
            self.loader.settled().result(timeout=10)
            assert self.pool.pinned_pages == 0
            self.loader.close()


TestPoolStates = PoolStates.TestCase
TestPoolStates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
