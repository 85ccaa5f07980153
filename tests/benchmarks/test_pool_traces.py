"""Replays of traces with known results."""

import pytest
import torch

from benchmarks.tiers.pool_hit_rate import table
from benchmarks.tiers.traces import Trace, layer_pages, replay, replay_directory
from vllm_hybrid_sparse.memory.device_pool import PoolShape


def shape(capacity: int, *, layers: int = 1, unified: bool = True, eviction: str = "lru") -> PoolShape:
    return PoolShape(
        capacity_pages=capacity, layers=layers, head_dim=16, dtype=torch.float32, unified=unified, eviction=eviction
    )


def test_what_fits_is_fetched_in_the_first_step_alone() -> None:
    trace: Trace = [[[[0, 1, 2]]]] * 4
    use = replay([trace], shape(3), microbatch_pages=2)
    assert (use.wanted_pages, use.hit_pages, use.evicted_pages) == (9, 9, 0)
    assert use.hit_rate == 1.0


def test_a_cycle_longer_than_the_pool_never_hits() -> None:
    trace: Trace = [[[[0, 1, 2]]]] * 4
    use = replay([trace], shape(2), microbatch_pages=1)
    assert (use.wanted_pages, use.hit_pages, use.evicted_pages) == (9, 0, 9)


def test_a_page_that_every_step_uses_stays_under_lru_alone() -> None:
    trace: Trace = [[[[0, step]]] for step in range(1, 9)]
    assert replay([trace], shape(2), microbatch_pages=1).hit_rate == 0.5
    assert replay([trace], shape(2, eviction="fifo"), microbatch_pages=1).hit_rate < 0.5


def test_a_hungry_layer_gains_from_slots_that_another_leaves() -> None:
    trace: Trace = [[[[0]], [[0, 1, 2]]]] * 3
    assert replay([trace], shape(4, layers=2), microbatch_pages=1).hit_rate == 1.0
    assert replay([trace], shape(4, layers=2, unified=False), microbatch_pages=1).hit_rate == pytest.approx(1 / 4)


def test_requests_share_no_page() -> None:
    trace: Trace = [[[[0, 1]]]] * 3
    assert replay([trace, trace], shape(4), microbatch_pages=2).hit_rate == 1.0
    assert replay([trace, trace], shape(3), microbatch_pages=2).hit_rate < 1.0


def test_the_directory_finds_what_fits_from_the_second_step_on() -> None:
    trace: Trace = [[[[0, 1], [2]], [[0], [1, 2, 3]]]] * 12
    use = replay_directory([trace, trace], 128)
    assert (use.wanted_pages, use.hit_pages) == (11 * 2 * 7, 11 * 2 * 7)
    assert use.late_hit_rate == 1.0


def test_the_directory_keeps_what_it_has_of_a_cycle_longer_than_the_pool() -> None:
    trace: Trace = [[[list(range(64))]]] * 40
    use = replay_directory([trace], 32)
    assert use.late_wanted_pages == 20 * 64
    assert use.late_hit_rate == pytest.approx(28 / 64, abs=4 / 64)  # 32 slots less the reserve
    assert replay([trace], shape(32), microbatch_pages=8).hit_rate == 0.0


def test_pages_are_counted_by_layer() -> None:
    trace: Trace = [[[[0], [1, 2]], [[0, 1, 2], []]], [[[0], [1]], [[0], []]]]
    assert layer_pages([trace, trace]) == [5.0, 4.0]


def test_the_table_has_a_line_a_row() -> None:
    row = {
        "policy": "p",
        "pool_share": 0.1,
        "pool": "unified",
        "eviction": "lru",
        "hit_rate": 0.5,
        "late_hit_rate": 0.25,
    }
    assert "50.0%" in table([{**row, "fetched_bytes_per_step": 2**20}]).splitlines()[2]
