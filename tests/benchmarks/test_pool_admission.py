"""Traces with known results, served through a pool with and without a rule of admission."""

import pytest
import torch

from benchmarks.tiers.admission import rows_of, serve, table
from benchmarks.tiers.traces import Trace
from vllm_hybrid_sparse.memory.device_pool import PoolShape
from vllm_hybrid_sparse.policy.admission import Admission
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

TOKENS = 48  # three pages, all of them retained
TRACE: Trace = [[[[0, 1, 2]]]] * 4


def shape(capacity: int) -> PoolShape:
    return PoolShape(capacity_pages=capacity, layers=1, head_dim=16, dtype=torch.float32, eviction="lru")


def rule(capacity: int) -> Admission:
    return Admission(retained=RetainedSet(), selection=SelectionSpec(), kv_heads=1, layer_pages=capacity)


def test_requests_that_do_not_fit_together_find_nothing_unless_they_wait_for_each_other() -> None:
    traces, lengths = [TRACE] * 3, [TOKENS] * 3
    together = serve(traces, lengths, shape(5), 2, None)
    assert (together.steps, together.requests_at_once, together.hit_rate) == (4, 3.0, 0.0)
    assert together.fetched_pages_per_token == 3.0
    waiting = serve(traces, lengths, shape(5), 2, rule(5))
    assert (waiting.steps, waiting.requests_at_once, waiting.hit_rate) == (12, 1.0, 1.0)
    assert waiting.tokens == together.tokens == 9
    assert waiting.fetched_pages_per_token == 0.0


def test_those_that_fit_run_together_and_the_next_joins_when_one_has_ended() -> None:
    served = serve([TRACE, TRACE[:2], TRACE], [TOKENS] * 3, shape(6), 2, rule(6))
    assert (served.steps, served.hit_rate) == (6, 1.0)
    assert served.requests_at_once == pytest.approx(10 / 6)


def test_every_pool_is_served_with_either_rule_and_shown() -> None:
    rows = rows_of([TRACE, TRACE], [TOKENS] * 2, "topk 5 %", [0.5, 1.0])
    assert [(row["pool_pages"], row["eviction"], row["admission"]) for row in rows] == [
        (pages, eviction, admission)
        for pages in (3, 6)
        for eviction in ("cyclic", "lru")
        for admission in ("working_set", "none")
    ]
    assert [row["requests_at_once"] for row in rows] == [1.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert len(table(rows).splitlines()) == 2 + len(rows)
