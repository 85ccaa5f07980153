"""Queueing delay: from the server if it reports one, otherwise estimated; the result says which."""

import math
from dataclasses import replace

import pytest

from tests.load.model_server import record_of
from vllm_hybrid_sparse.load.exchange import Outcome, Record
from vllm_hybrid_sparse.load.prometheus import Histogram
from vllm_hybrid_sparse.load.queueing import (
    ESTIMATED,
    FROM_SERVER,
    UNKNOWN,
    Unloaded,
    computed_tokens,
    estimated_s,
    queueing,
)

UNLOADED = Unloaded(((100, 1.0), (300, 2.0)), 0.01)


def test_unloaded_takes_the_median_of_each_length_and_of_all_gaps() -> None:
    records = [
        record_of([(1.0, 1), (1.1, 1)], prompt_tokens=100),
        record_of([(3.0, 1), (3.2, 1)], prompt_tokens=100),
        record_of([(2.0, 1), (2.3, 1)], prompt_tokens=100),
        record_of([(9.0, 1)], prompt_tokens=300),
        record_of([(50.0, 1)], prompt_tokens=400, outcome=Outcome.FAILED),
    ]
    unloaded = Unloaded.of(records)
    assert unloaded.ttft_s == ((100, 2.0), (300, 9.0))
    assert unloaded.gap_s == pytest.approx(0.2)
    assert Unloaded.of([]) == Unloaded((), None)


@pytest.mark.parametrize(("tokens", "expected"), [(50, 1.0), (100, 1.0), (200, 1.5), (300, 2.0), (999, 2.0)])
def test_expected_time_lies_between_the_measured_lengths(tokens: int, expected: float) -> None:
    assert UNLOADED.expected_ttft_s(tokens) == pytest.approx(expected)


def test_an_unknown_length_is_compared_only_where_there_is_one_time() -> None:
    assert UNLOADED.expected_ttft_s(None) is None
    assert Unloaded(((100, 1.0),), None).expected_ttft_s(None) == 1.0
    assert Unloaded((), None).expected_ttft_s(100) is None


def test_the_estimate_is_what_the_first_token_came_later_and_never_negative() -> None:
    assert estimated_s(record_of([(2.5, 1)], prompt_tokens=200), UNLOADED) == pytest.approx(1.0)
    assert estimated_s(record_of([(0.5, 1)], prompt_tokens=200), UNLOADED) == 0.0
    assert estimated_s(record_of([], prompt_tokens=200), UNLOADED) is None


def test_the_server_s_word_goes_before_the_estimate() -> None:
    records = [record_of([(2.5, 1)], prompt_tokens=200)]
    told = queueing(records, Histogram((1.0, math.inf), (4.0, 4.0)), UNLOADED)
    assert (told.source, told.requests, told.p50_s) == (FROM_SERVER, 4, 1.0)
    for silent in (None, Histogram((1.0, math.inf), (0.0, 0.0))):
        estimated = queueing(records, silent, UNLOADED)
        assert (estimated.source, estimated.requests, estimated.p50_s) == (ESTIMATED, 1, pytest.approx(1.0))


def test_a_histogram_tells_between_which_bounds_a_delay_lies_and_no_more() -> None:
    idle = queueing([], Histogram((0.3, 0.5, math.inf), (8.0, 8.0, 8.0)), UNLOADED)
    assert (idle.p50_s, idle.p90_s, idle.p99_s, idle.above_s) == (0.3, 0.3, 0.3, (0.0, 0.0, 0.0))
    assert idle.median() == "≤0.3"
    busy = queueing([], Histogram((0.3, 0.5, math.inf), (0.0, 9.0, 10.0)), UNLOADED)
    assert (busy.p50_s, busy.p99_s, busy.above_s) == (0.5, 0.5, (0.3, 0.3, 0.5))
    assert busy.median() == "0.3–0.5"
    assert queueing([], Histogram((0.3, math.inf), (0.0, 1.0)), UNLOADED).median() == ">0.3"
    estimated = queueing([record_of([(2.5, 1)], prompt_tokens=200)], None, UNLOADED)
    assert (estimated.above_s, estimated.median()) == (None, "1.00")


def test_tokens_known_to_be_cached_are_not_computed() -> None:
    """One millisecond a computed token: a cached document of 6000 tokens must not stand for a prompt of that length."""

    def record(tokens: int, cached: int | None, ttft_s: float) -> Record:
        return replace(record_of([(ttft_s, 1)], prompt_tokens=tokens), cached_tokens=cached)

    alone = [record(1000, None, 1.0), record(6100, 6000, 0.1), record(6120, 6000, 0.12), record(16000, 0, 16.0)]
    unloaded = Unloaded.of(alone)
    assert [tokens for tokens, _ in unloaded.ttft_s] == [100, 120, 1000, 16000]
    assert estimated_s(record(5500, 0, 7.5), unloaded) == pytest.approx(2.0)
    assert estimated_s(record(9000, 8000, 1.5), unloaded) == pytest.approx(0.5)
    assert computed_tokens(record(5, 9, 1.0)) == 0
    assert computed_tokens(record_of([(1.0, 1)])) is None


def test_where_nothing_tells_it_is_not_known() -> None:
    unknown = queueing([record_of([(2.5, 1)])], None, Unloaded((), None))
    assert (unknown.source, unknown.requests, unknown.p50_s) == (UNKNOWN, 0, None)
