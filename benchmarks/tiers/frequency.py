"""Orders of eviction that the shipped pool does not have: by how often pages were used, and by the future.

    lfu        the page with the fewest uses so far goes first, ties the least recently used one; uses of pages that
               left count again when they return
    frequent   the page that the fewest of the last steps used goes first, a step counting half as much as one eight
               steps later; ties the most recently used one. The current step does not count, or the layers whose turn
               is still to come would look rare
    future     the page that is wanted again last goes first (Belady): no order finds more. It cannot be served

They replay the same traces as `traces.replay`, one microbatch of a group at a time.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import groupby
from operator import itemgetter

import numpy as np

from benchmarks.tiers.traces import PoolUse, Trace, pages_apart, pool_use
from vllm_hybrid_sparse.memory.page_keys import page_numbers

ORDERS = ("lfu", "frequent", "future")
_HALF_LIFE_STEPS = 8
Worth = tuple[float, float]


class WorthPool:
    """Slots whose pages leave in ascending order of their worth."""

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._worth: dict[int, Worth] = {}
        self._heap: list[tuple[Worth, int]] = []  # also of pages that left, and of earlier worths
        self.evictions = 0

    def __contains__(self, page: int) -> bool:
        return page in self._worth

    def keep(self, page: int, worth: Worth, pinned: Set[int]) -> None:
        """Give a page a slot if it has none, and a worth. Pinned pages make no room; one slot must be without."""
        if page not in self._worth and len(self._worth) == self._capacity:
            self._evict(pinned)
        self._worth[page] = worth
        heapq.heappush(self._heap, (worth, page))

    def _evict(self, pinned: Set[int]) -> None:
        passed = []
        while True:
            worth, page = heapq.heappop(self._heap)
            if self._worth.get(page) != worth:
                continue
            if page not in pinned:
                break
            passed.append((worth, page))
        del self._worth[page]
        self.evictions += 1
        for entry in passed:
            heapq.heappush(self._heap, entry)


def reads(traces: Sequence[Trace], microbatch_pages: int) -> Iterator[tuple[int, int, list[int]]]:
    """Each microbatch that the requests of some traces read side by side: its step, its layer, its pages' numbers."""
    apart = pages_apart(traces)
    for number, steps in enumerate(zip(*traces, strict=True)):
        for layer in range(len(steps[0])):
            for request, step in enumerate(steps):
                for head, pages in enumerate(step[layer]):
                    numbers = page_numbers(layer, head, request * apart + np.array(pages, dtype=np.int64)).tolist()
                    for first in range(0, len(numbers), microbatch_pages):
                        yield number, layer, numbers[first : first + microbatch_pages]


def next_uses(wanted: Sequence[int]) -> list[float]:
    """For each use of a page, the place of the page's next use; infinite if there is none."""
    following: dict[int, int] = {}
    places = [float("inf")] * len(wanted)
    for place in range(len(wanted) - 1, -1, -1):
        places[place] = following.get(wanted[place], float("inf"))
        following[wanted[place]] = place
    return places


def replay_order(
    traces: Sequence[Trace], order: str, capacity_pages: int, microbatch_pages: int, *, unified: bool
) -> PoolUse:
    """Serve the requests of some traces as `traces.replay` does, evicting in one of `ORDERS`.

    capacity_pages   slots of all layers together, at least a microbatch in each share
    """
    layers = len(traces[0][0])
    shares = 1 if unified else layers
    pools = [WorthPool(capacity_pages // shares) for _ in range(shares)]
    listed = list(reads(traces, microbatch_pages))
    following = next_uses([page for _, _, pages in listed for page in pages])
    uses: Counter[int] = Counter()
    # The sum of powers of two that grow with the step, over the steps before this one that used the page.
    in_steps: defaultdict[int, float] = defaultdict(float)
    counts, place, evicted = [], 0, 0

    def worth(page: int) -> Worth:
        if order == "lfu":
            return uses[page], place
        return (in_steps[page], -place) if order == "frequent" else (-following[place], 0)

    for number, of_step in groupby(listed, key=itemgetter(0)):
        wanted, hits = 0, 0
        last_use: dict[int, tuple[WorthPool, int]] = {}
        for _, layer, pages in of_step:
            pool = pools[layer % shares]
            wanted, hits = wanted + len(pages), hits + sum(page in pool for page in pages)
            for page in pages:
                uses[page] += 1
                last_use[page] = pool, place
                pool.keep(page, worth(page), set(pages))
                place += 1
        counts.append(np.array([wanted, hits]))
        if order == "frequent":
            for page, (pool, used_at) in last_use.items():
                in_steps[page] += 2 ** (number / _HALF_LIFE_STEPS)
                if page in pool:
                    pool.keep(page, (in_steps[page], -used_at), set())
        if number == 0:
            evicted = sum(pool.evictions for pool in pools)
    return pool_use(counts, sum(pool.evictions for pool in pools) - evicted)
