"""Replays with orders of eviction by frequency and by the future, on traces with known results."""

import random

import pytest
import torch

from benchmarks.tiers.frequency import ORDERS, WorthPool, next_uses, replay_order
from benchmarks.tiers.traces import Trace, replay
from vllm_hybrid_sparse.memory.device_pool import PoolShape


def test_what_a_pool_evicts_has_the_least_worth_of_what_is_not_pinned() -> None:
    pool = WorthPool(2)
    pool.keep(1, (1.0, 0.0), set())
    pool.keep(2, (2.0, 0.0), set())
    pool.keep(1, (3.0, 0.0), set())
    pool.keep(3, (0.0, 0.0), pinned={2, 3})
    assert (1 in pool, 2 in pool, 3 in pool, pool.evictions) == (False, True, True, 1)


def test_the_next_use_of_each() -> None:
    assert next_uses([7, 8, 7, 7]) == [2, float("inf"), 3, float("inf")]


@pytest.mark.parametrize("order", ORDERS)
def test_what_fits_is_fetched_in_the_first_step_alone(order: str) -> None:
    trace: Trace = [[[[0, 1], [2]], [[0], [5]]]] * 4
    for unified, capacity in ((True, 5), (False, 6)):
        use = replay_order([trace], order, capacity, microbatch_pages=2, unified=unified)
        assert (use.wanted_pages, use.hit_pages, use.evicted_pages) == (15, 15, 0)


def test_a_page_of_every_step_stays_whatever_passes_through() -> None:
    """Three new pages a step push it out of a pool of three under LRU, not where its uses count."""
    trace: Trace = [[[[0, 3 * step + 1, 3 * step + 2, 3 * step + 3]]] for step in range(9)]
    lru = PoolShape(capacity_pages=3, layers=1, head_dim=16, dtype=torch.float32, eviction="lru")
    assert replay([trace], lru, microbatch_pages=1).hit_pages == 0
    for order in ORDERS:
        use = replay_order([trace], order, 3, microbatch_pages=1, unified=True)
        assert use.hit_pages >= 7  # of 8; the first step fills the pool before anything is known


def test_turns_of_layers_defeat_the_bare_count_alone() -> None:
    """All pages are used alike, so the fewest uses are those of the layers whose turn is next."""
    trace: Trace = [[[[0, 1, 2, 3]]] * 4] * 12
    found = {order: replay_order([trace], order, 8, microbatch_pages=2, unified=True).hit_rate for order in ORDERS}
    assert found["lfu"] == 0.0
    assert found["frequent"] >= 0.3
    assert found["future"] >= found["frequent"]


def test_no_order_finds_more_than_the_one_that_knows_the_future() -> None:
    draw = random.Random(0)
    trace: Trace = [[[draw.sample(range(20), 6)] for _ in range(3)] for _ in range(30)]
    best = replay_order([trace], "future", 20, microbatch_pages=1, unified=True).hit_rate
    for order in ("lfu", "frequent"):
        assert replay_order([trace], order, 20, microbatch_pages=1, unified=True).hit_rate < best
    for eviction in ("cyclic", "lru", "fifo"):
        shape = PoolShape(capacity_pages=20, layers=3, head_dim=16, dtype=torch.float32, eviction=eviction)
        assert replay([trace], shape, microbatch_pages=1).hit_rate < best


def test_a_hungry_layer_gains_from_slots_that_another_leaves() -> None:
    trace: Trace = [[[[0]], [[0, 1, 2]]]] * 3
    assert replay_order([trace], "lfu", 4, microbatch_pages=1, unified=True).hit_rate == 1.0
    assert replay_order([trace], "lfu", 4, microbatch_pages=1, unified=False).hit_rate < 1.0
