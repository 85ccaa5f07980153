"""Each rule is broken by the fault it is there for, and by nothing else."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak.readings import COUNTERS, Process, Reading, role
from benchmarks.soak.verdict import rules, settled

HEADS = 6
TALLY = {"right": 10}
WORKER = Process(1000, 8, 20, 1.0)


def reading(minute: float, **changes: float) -> Reading:
    """A server at rest after `minute` minutes. In each minute it decoded one row and made one prompt's first token."""
    counters = dict.fromkeys(COUNTERS, 0.0)
    counters |= {
        "vllm:generation_tokens_total": 2 * minute,
        "vllm:time_to_first_token_seconds_count": minute,
        "vllm_hybrid_sparse_decode_rows_total": minute,
        "vllm_hybrid_sparse_selections_total": HEADS * minute,
        "vllm_hybrid_sparse_context_pages_total": 100 * minute,
        "vllm_hybrid_sparse_read_pages_total": 50 * minute,
        "vllm_hybrid_sparse_host_kv_bytes": 1e6,
    }
    return Reading(60 * minute, {"worker": WORKER, "engine": WORKER, "api server": WORKER}, counters | changes)


READINGS = [reading(minute) for minute in (0.0, 5.0, 10.0, 15.0)]


def broken(readings: list[Reading], tally: dict[str, int] = TALLY, tokens: int = 20) -> set[str]:
    return {rule.name for rule in rules(readings, tally, 900.0, 600.0, HEADS, tokens) if not rule.held}


def test_a_good_soak_breaks_nothing() -> None:
    assert broken(READINGS) == set()


@pytest.mark.parametrize("kind", ["wrong", "lost", "unexpected"])
def test_one_bad_answer_is_too_many(kind: str) -> None:
    assert broken(READINGS, {**TALLY, kind: 1}) == {f"{kind} answers"}


def test_one_error_of_the_server_is_too_many() -> None:
    assert broken(READINGS, {**TALLY, "server errors": 1}) == {"server errors"}


def test_a_soak_that_ended_early_shows_less_than_asked() -> None:
    assert broken(READINGS[:-1]) == {"minutes of load"}


def test_a_soak_that_checked_nothing_shows_nothing() -> None:
    assert broken(READINGS, {}) == {"answers checked"}


def test_pages_that_stay_taken_are_found_at_any_reading() -> None:
    leaking = [*READINGS[:1], reading(5.0, **{"vllm:kv_cache_usage_perc": 0.01}), *READINGS[2:]]
    assert broken(leaking) == {"vllm:kv_cache_usage_perc at rest"}


@pytest.mark.parametrize(
    ("grown", "rule"),
    [
        ({"resident_bytes": 1021}, "memory"),
        ({"threads": 9}, "threads"),
        ({"files": 21}, "files"),
    ],
)
@pytest.mark.parametrize("name", ["worker", "engine"])
def test_what_grows_after_settling_is_a_leak(name: str, grown: dict[str, int], rule: str) -> None:
    last = replace(READINGS[-1], processes={**READINGS[-1].processes, name: replace(WORKER, **grown)})
    assert broken([*READINGS[:-1], last]) == {f"{name}: {rule}"}


def test_what_grows_before_settling_is_none() -> None:
    small = replace(READINGS[0], processes=dict.fromkeys(READINGS[0].processes, Process(100, 1, 1, 0.0)))
    assert broken([small, *READINGS[1:]]) == set()
    assert settled(READINGS, 600.0) is READINGS[2]
    assert settled(READINGS, 1e9) is READINGS[2]  # the soak is too short: the last reading but one


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("vllm:generation_tokens_total", 19.0, "tokens counted are at least those received"),
        ("vllm_hybrid_sparse_selections_total", 89.0, "selections of each row"),
        ("vllm_hybrid_sparse_read_pages_total", 1501.0, "pages read of the context"),
        ("vllm_hybrid_sparse_read_pages_total", 0.0, "pages read of the context"),
        ("vllm_hybrid_sparse_early_stops_total", 1.0, "early stops among what was judged"),
        ("vllm_hybrid_sparse_kept_mass_total", 1.0, "kept weight of what was judged"),
        ("vllm:num_preemptions_total", 1.0, "preemptions"),
        ("vllm_hybrid_sparse_packed_bytes", 1.0, "packed bytes"),
    ],
)
def test_counters_that_do_not_fit_are_found(name: str, value: float, rule: str) -> None:
    assert rule in broken([*READINGS[:-1], reading(15.0, **{name: value})])


def test_a_counter_that_falls_is_found() -> None:
    assert "counters never fall" not in broken(READINGS)
    before = READINGS[0].counters["vllm_hybrid_sparse_read_pages_total"]
    last = reading(15.0, vllm_hybrid_sparse_read_pages_total=before - 1.0)
    assert "counters never fall" in broken([*READINGS[:-1], last])


def test_rows_that_were_not_counted_are_found() -> None:
    missing = {"vllm_hybrid_sparse_decode_rows_total": 14.0, "vllm_hybrid_sparse_selections_total": 14.0 * HEADS}
    assert broken([*READINGS[:-1], reading(15.0, **missing)]) == {"every token but a prompt's first has a decode row"}


def test_metrics_that_are_gone_are_found() -> None:
    last: Any = reading(15.0)
    del last.counters["vllm_hybrid_sparse_read_pages_total"]
    assert broken([*READINGS[:-1], last]) == {"metrics there"}


def test_processes_are_known_by_their_command_lines() -> None:
    assert role("VLLM::Worker") == "worker"
    assert role("VLLM::EngineCore") == "engine"
    assert role("/bin/python /bin/vllm serve MODEL --port 1") == "api server"
    assert role("python -c from multiprocessing.resource_tracker import main") is None
