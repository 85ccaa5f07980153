"""Thousands of requests over slots whose content only a directory knows: nothing is stale, no slot is lost."""

import random
from collections import deque

import numpy as np
import torch

from tests.memory.many_requests import REQUESTS, drive
from vllm_hybrid_sparse.kernels.page_directory import reference
from vllm_hybrid_sparse.kernels.page_directory.state import NOTHING, SET_ASIDE
from vllm_hybrid_sparse.memory.device_directory import DeviceDirectory
from vllm_hybrid_sparse.values import PAGE_TOKENS

BLOCKS, CAPACITY, RUN = 64, 30, 3


class Traffic:
    """Requests that come, decode and leave, at most four at a time; blocks of one page, one layer and KV head.

    Now and then runs of slots are set aside, as for frames, and given back.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = DeviceDirectory(1, 1, BLOCKS, 1, CAPACITY, torch.device("cpu"), kernels=reference)
        self.host = np.zeros(BLOCKS, dtype=np.int64)  # what each page holds: how often it was written anew
        self.slots: dict[int, tuple[int, int]] = {}  # the page that was put there, and what it held
        self.free = deque(range(BLOCKS))
        self.running: list[tuple[list[int], int]] = []  # blocks and tokens
        self.aside: list[int] = []
        self.written: list[int] = []  # pages that the next step writes anew
        self.started = self.found = self.read = 0

    def start(self) -> None:
        """Prefill: what the blocks held before is overwritten."""
        tokens = self.rng.randint(1, 12 * PAGE_TOKENS)
        blocks = [self.free.popleft() for _ in range(-(-tokens // PAGE_TOKENS))]
        self.written += blocks
        self.running.append((blocks, tokens))
        self.started += 1

    def decode(self) -> None:
        """One step: a token each, and all pages of all rows are looked up and read."""
        rows = []
        for blocks, tokens in self.running:
            if tokens % PAGE_TOKENS == 0:
                blocks.append(self.free.popleft())
                self.written.append(blocks[-1])
            rows.append((blocks, tokens + 1))
        self.running, written, self.written = rows, self.written, []
        self.host[written] += 1
        self.directory.begin_step(written)
        self._set_aside()
        table = torch.zeros(len(rows), max(len(blocks) for blocks, _ in rows), dtype=torch.int32)
        for row, (blocks, _) in zip(table, rows, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        lengths = torch.tensor([tokens for _, tokens in rows], dtype=torch.int32)
        counts = torch.tensor([[len(blocks)] for blocks, _ in rows], dtype=torch.int32)
        none = torch.zeros(len(rows), dtype=torch.int32)
        listed = self.directory.look_up(0, table, lengths, none, counts, None, first_page=0, most=table.shape[1])
        for slots, (blocks, _) in zip(listed.slots[:, 0].tolist(), rows, strict=True):
            for slot, page in zip(slots, blocks, strict=False):
                self.attend(page, slot)

    def attend(self, page: int, slot: int) -> None:
        """Read a page where it is said to be, and put it where it is to go."""
        self.read += 1
        if slot >= 0:
            self.found += 1
            assert self.slots[slot] == (page, self.host[page])
        elif slot < -1:
            assert not any(first <= -2 - slot < first + RUN for first in self.aside)
            self.slots[-2 - slot] = page, int(self.host[page])

    def _set_aside(self) -> None:
        if self.rng.random() < 0.1:
            firsts = np.array(self.aside, dtype=np.int32)
            self.directory.give_back(firsts, RUN)
            self.aside = [] if self.aside else self.rng.sample(range(0, CAPACITY, RUN), 3)
            assert self.directory.set_aside(np.array(self.aside, dtype=np.int32), RUN).all()

    def leave(self) -> None:
        """Some finish, some are aborted: nobody is told either way."""
        for request in [request for request in self.running if self.rng.random() < 0.3]:
            self.running.remove(request)
            self.free.extend(request[0])

    def check(self) -> None:
        """The directory is sound."""
        reference.check_integrity(self.directory.state)


def test_ten_thousand_requests_find_what_was_stored_and_lose_no_slot() -> None:
    traffic = Traffic(seed=0)
    drive(traffic)
    traffic.check()
    assert traffic.started == REQUESTS
    assert traffic.found > traffic.read / 5
    if traffic.aside:
        traffic.directory.give_back(np.array(traffic.aside, dtype=np.int32), RUN)
    traffic.directory.begin_step(range(BLOCKS))
    state = traffic.directory.state
    assert (state.pages == NOTHING).all()
    assert (state.used != SET_ASIDE).all()
