"""Figures of records, with numbers small enough to work out by hand."""

import pytest

from tests.load.model_server import record_of
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.exchange import Outcome
from vllm_hybrid_sparse.load.figures import Figures, Limits, figures
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Run

NOTHING_KNOWN = Unloaded((), None)
A = record_of([(1.0, 1), (1.1, 1), (1.4, 1)], prompt_tokens=10)
B = record_of([(2.0, 1), (2.5, 3)], prompt_tokens=20)  # three tokens that came together
BROKEN = record_of([(9.0, 1), (99.0, 1)], outcome=Outcome.FAILED, reason="broke")
REFUSED = record_of([], outcome=Outcome.REFUSED, reason="HTTP 429: full")


def of(*records: object, planned: int | None = None, duration_s: float = 10.0, limits: Limits | None = None) -> Figures:
    run = Run(tuple(records), len(records) if planned is None else planned, duration_s, False)  # type: ignore[arg-type]
    return figures([run], None, NOTHING_KNOWN, limits)


def test_times_are_those_of_a_request_by_definition() -> None:
    assert (A.ttft_s, A.e2e_s) == (pytest.approx(1.0), pytest.approx(1.4))
    assert A.gaps_s == pytest.approx([0.1, 0.3])
    assert A.tpot_s == pytest.approx(0.2)
    assert B.gaps_s == pytest.approx([0.5])
    assert B.tpot_s == pytest.approx(0.5 / 3)  # by the tokens, not by the arrivals
    assert record_of([(1.0, 1)]).tpot_s is None
    assert REFUSED.ttft_s is None
    assert REFUSED.e2e_s is None


def test_only_answered_requests_make_the_latencies_and_every_one_is_accounted_for() -> None:
    seen = of(A, B, BROKEN, REFUSED, planned=6)
    assert seen.outcomes == {"ok": 2, "failed": 1, "refused": 1}
    assert seen.reasons == {"failed: broke": 1, "refused: HTTP 429: full": 1}
    assert (seen.not_sent, seen.all_answered) == (2, False)
    assert (seen.ttft_s.count, seen.ttft_s.max) == (2, pytest.approx(2.0))
    assert seen.tbt_s.count == 3
    assert seen.tbt_s.p50 == pytest.approx(0.3)
    assert seen.tpot_s.p50 == pytest.approx((0.2 + 0.5 / 3) / 2)
    assert seen.e2e_s.max == pytest.approx(2.5)
    assert (seen.output_tokens, seen.prompt_tokens, seen.most_tokens_together) == (7, 30, 3)


def test_gaps_are_pooled_and_also_told_by_request() -> None:
    seen = of(A, B)
    assert seen.request_median_tbt_s.count == 2
    assert seen.request_median_tbt_s.p50 == pytest.approx((0.2 + 0.5) / 2)
    assert seen.request_p99_tbt_s.max == pytest.approx(0.5)


def test_throughput_is_over_the_time_of_the_run() -> None:
    seen = of(A, B, BROKEN, duration_s=4.0)
    assert (seen.requests_per_s, seen.output_tokens_per_s) == (0.5, 7 / 4)
    assert seen.total_tokens_per_s == 37 / 4


def test_several_runs_are_one_with_their_times_added() -> None:
    both = figures([Run((A,), 1, 2.0, False), Run((B,), 2, 6.0, True)], None, NOTHING_KNOWN)
    assert (both.planned, both.not_sent, both.duration_s, both.requests_per_s) == (3, 1, 8.0, 0.25)


def test_a_run_of_nothing_has_no_times_and_no_rates() -> None:
    seen = of(duration_s=0.0)
    assert (seen.ttft_s.count, seen.ttft_s.p50, seen.requests_per_s) == (0, None, 0.0)
    assert seen.all_answered


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft:1000", 1),
        ("ttft:999", 0),
        ("ttft:2000", 2),
        ("tbt:299", 1),  # P99 of A's gaps lies at 298
        ("tbt:297", 0),
        ("tpot:170", 1),
        ("e2e:1400.1", 1),
        ("ttft:2000,e2e:1400.1", 1),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: str, good: int) -> None:
    seen = of(A, B, BROKEN, duration_s=2.0, limits=Limits.parse("goodput", limits))
    assert seen.goodput_per_s == good / 2


def test_a_single_token_keeps_the_limits_on_gaps() -> None:
    assert of(record_of([(1.0, 1)]), duration_s=1.0, limits=Limits(tbt=1.0, tpot=1.0)).goodput_per_s == 1.0


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:soon", "itl:5", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:5,ttft:6"]
)
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^goodput={text}: "):
        Limits.parse("goodput", text)


def test_short_answers_are_counted_where_the_end_was_to_be_ignored() -> None:
    told = [(1.0, 1), (1.1, 1)]
    short = record_of(told, Request(prompt="a", max_tokens=3, ignore_eos=True))
    stopped = record_of(told, Request(prompt="a", max_tokens=3))
    assert of(short, stopped).short_answers == 1
