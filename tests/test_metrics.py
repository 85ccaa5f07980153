"""Sums over what was read, and the line that a person reads."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from vllm_hybrid_sparse.metrics import DecodeStats, Interval, TierStats

GIB = 2**30
STEP = DecodeStats(
    rows=30,
    selections=60,
    pages_total=1000,
    pages_read=90,
    pages_shared=60,
    pages_wasted=10,
    total_bytes=8 * GIB,
    read_bytes=GIB,
    summary_bytes=GIB // 4,
    early_stops=3,
    judged=40,
    kept_mass=39.0,
    microbatches=50,
    streaming=3,
    anchor_bytes=GIB // 4,
)


def test_the_native_sums_are_taken_over_by_name() -> None:
    native = SimpleNamespace(
        items=1, pages_total=20, pages_read=3, pages_shared=5, pages_wasted=4, summary_bytes=40, stopped_early=6,
        judged=7, kept_mass=6.5, microbatches=8, streaming=9, anchor_pages=10,
    )  # fmt: skip
    layout = SimpleNamespace(page_bytes=100)
    assert DecodeStats.from_native(native, layout) == DecodeStats(
        selections=1, pages_total=20, pages_read=3, pages_shared=5, pages_wasted=4, total_bytes=2000, read_bytes=740,
        summary_bytes=40, early_stops=6, judged=7, kept_mass=6.5, microbatches=8, streaming=9, anchor_bytes=1000,
    )  # fmt: skip


def test_every_sum_is_added() -> None:
    both = STEP + STEP
    for entry in fields(DecodeStats):
        assert getattr(STEP, entry.name) > 0
        assert getattr(both, entry.name) == 2 * getattr(STEP, entry.name), entry.name
    assert STEP + DecodeStats() == STEP


def test_the_line_says_what_was_read_and_kept() -> None:
    assert STEP.describe(seconds=4.0, packed_bytes=GIB // 2) == (
        "hybrid_sparse: decoded 30 tokens (7.5 a second), reading 12.5% of their KV cache (1.00 of 8.00 GiB); "
        "kept 97.5% of the attention weight by estimate; "
        "40.0% of the pages attended to came with other rows' reading; "
        "10.0% of the pages read were dropped; 5.0% of the groups streamed; anchors took 0.25 GiB more; "
        "packed copies hold 0.50 GiB"
    )


def test_the_line_leaves_out_what_there_is_not() -> None:
    dense = DecodeStats(rows=2, pages_total=9, pages_read=9, total_bytes=GIB, read_bytes=GIB)
    assert dense.describe() == "hybrid_sparse: decoded 2 tokens, reading 100.0% of their KV cache (1.00 of 1.00 GiB)"
    assert DecodeStats().share_read == 0.0


def test_a_line_is_due_when_its_time_has_passed_since_the_first_step() -> None:
    interval = Interval(60.0)
    assert not interval.due(1e9)  # nothing was decoded
    interval.add(STEP, None, 1000.0)
    interval.add(STEP, None, 1050.0)
    assert not interval.due(1059.9)
    assert interval.due(1060.0)


def test_lines_that_are_due_when_a_step_comes_say_nothing_of_the_idle_time_before_it() -> None:
    interval = Interval(60.0)
    interval.add(STEP, None, 1000.0)
    interval.add(STEP, None, 1020.0)
    assert interval.due(1600.0)
    (line,) = interval.take(packed_bytes=0)  # as the worker does before it counts the step at 1600
    assert "decoded 60 tokens (1.5 a second)" in line


def test_the_rate_is_that_of_the_time_between_the_steps_and_each_line_begins_anew() -> None:
    interval = Interval(60.0)
    interval.add(STEP, None, 1000.0)
    interval.add(DecodeStats(), None, 1005.0)  # a prompt
    interval.add(STEP, None, 1010.0)
    (line,) = interval.take(packed_bytes=0)
    assert "decoded 60 tokens (3.0 a second)" in line
    assert interval.take(packed_bytes=0) == []
    interval.add(STEP, None, 5000.0)
    assert not interval.due(5001.0)
    (line,) = interval.take(packed_bytes=0)
    assert "decoded 30 tokens, reading" in line  # one step has no duration


@pytest.mark.parametrize("steps", [2, 3, 600])
def test_the_rate_of_steps_of_equal_length_does_not_depend_on_their_number(steps: int) -> None:
    interval = Interval(60.0)
    step = DecodeStats(rows=8, pages_total=1, total_bytes=GIB)
    for index in range(steps):
        interval.add(step, None, 1000.0 + index / 10)
    (line,) = interval.take(packed_bytes=0)
    assert f"decoded {8 * steps} tokens (80.0 a second)" in line


def test_a_device_has_a_line_of_its_own_which_begins_anew_too() -> None:
    interval = Interval(60.0)
    tiers = TierStats(
        groups=8,
        pages_wanted=40,
        pages_hit=30,
        pages_fetched=10,
        pages_evicted=7,
        pages_wasted=2,
        pages_on_host=3,
        groups_on_host=1,
        microbatches=5,
        early_stops=4,
        looked_groups=2,
        kept_mass=1.9,
        failed_loads=6,
        device_busy_s=0.6,
        host_busy_s=0.2,
        step_s=1.0,
    )
    interval.add(STEP, tiers, 1000.0)
    interval.add(STEP, tiers, 1001.0)
    assert interval.take(packed_bytes=0)[1:] == [
        "hybrid_sparse: device pool hit 75.0 % of 80 pages (20 fetched, 14 evicted, 4 wasted); 2 of 16 groups and 6 "
        "pages on the host; 10 microbatches, 8 early stops, kept mass 0.950; device idle 40 %, host busy 20 %; 12 "
        "failed loads"
    ]
    interval.add(STEP, TierStats(), 2000.0)
    assert len(interval.take(packed_bytes=0)) == 1


def test_what_is_not_known_of_a_device_is_a_dash() -> None:
    """Rows that the device ranks or reads by itself are not timed, and its directory does not tell what it evicts."""
    ranked = TierStats(groups=4, ranked_groups=4, pages_wanted=10, pages_hit=9, pages_fetched=1)
    assert ranked.describe() == (
        "hybrid_sparse: device pool hit 90.0 % of 10 pages (1 fetched, - evicted, 0 wasted); 4 groups ranked by the "
        "device; 0 of 4 groups and 0 pages on the host; 0 microbatches, 0 early stops, kept mass -; device idle -, "
        "host busy -; 0 failed loads"
    )
    resident = TierStats(groups=4, resident_groups=4, pages_evicted=3)
    assert "3 evicted" in resident.describe()
    assert "device idle -, host busy -" in resident.describe()
