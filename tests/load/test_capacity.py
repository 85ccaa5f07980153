"""The search for the highest rate: on made-up verdicts, and on servers that are a few timers."""

import asyncio
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.load.model_server import ModelSide, record_of, simple_requests
from tests.load.virtual_time import run_virtually
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import Schedule, poisson
from vllm_hybrid_sparse.load.capacity import Search, Slo, bracket, psa_slos
from vllm_hybrid_sparse.load.exchange import Outcome
from vllm_hybrid_sparse.load.figures import figures
from vllm_hybrid_sparse.load.prometheus import Histogram
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Report, Run
from vllm_hybrid_sparse.load.search import Capacity, never_known, search_in_turns, sent_too_late, whatever_the_rate
from vllm_hybrid_sparse.load.side import Measured
from vllm_hybrid_sparse.load.turns import Load, Results


@given(capacity=st.floats(0.01, 100), first=st.floats(0.01, 100), tolerance=st.sampled_from([0.02, 0.1, 0.5]))
def test_bisecting_closes_in_on_the_capacity(capacity: float, first: float, tolerance: float) -> None:
    search, tried = Search(first=first, tolerance=tolerance), []
    while (rate := search.next_rate(tried)) is not None:
        assert rate not in [before for before, _ in tried]
        tried.append((rate, rate <= capacity))
        assert len(tried) < 30
    low, high = bracket(tried)
    assert low is not None
    assert high is not None
    assert low <= capacity < high <= low * (1 + tolerance)


def test_a_rate_that_held_above_one_that_failed_does_not_count() -> None:
    assert bracket([(1.0, True), (2.0, False), (4.0, True)]) == (1.0, 2.0)
    assert Search(first=1.0).next_rate([(1.0, True), (2.0, False), (4.0, True)]) == pytest.approx(math.sqrt(2))


def test_a_search_ends_when_its_bracket_is_as_narrow_as_was_asked_for() -> None:
    search = Search(first=1.0, tolerance=0.5)
    assert search.next_rate([(2.0, True), (3.0, False)]) is None
    assert search.next_rate([(2.0, True), (3.1, False)]) == pytest.approx(math.sqrt(6.2))


def test_without_a_verdict_there_is_no_bracket() -> None:
    assert bracket([]) == (None, None)
    assert bracket([(1.0, True)]) == (1.0, None)
    assert bracket([(1.0, False)]) == (None, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"first": 0.0},
        {"first": 1.0, "tolerance": 0.0},
        {"first": 1.0, "tries": 0},
        {"first": 1.0, "step": 1.0},
        {"first": 1.0, "try_s": 0.0},
    ],
)
def test_a_search_that_cannot_end_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Search(**settings)  # type: ignore[arg-type]


def test_limits_are_five_and_twenty_five_iterations() -> None:
    strict, relaxed = psa_slos(0.03)
    assert (strict.p99_tbt_s, relaxed.p99_tbt_s) == (pytest.approx(0.15), pytest.approx(0.75))
    assert strict.p50_queueing_s == relaxed.p50_queueing_s == 2.0
    with pytest.raises(ConfigError, match="iteration-ms=0: must be above 0"):
        psa_slos(0.0)


def test_every_part_of_a_limit_can_break_it() -> None:
    answered = record_of([(3.0, 1), (3.1, 1)], prompt_tokens=100)
    refused = record_of([], outcome=Outcome.REFUSED)

    def broken(*records: object, unloaded_s: float = 1.5, limit_s: float = 0.2) -> list[str]:
        seen = figures([Run(records, len(records), 4.0, False)], None, Unloaded(((100, unloaded_s),), None))  # type: ignore[arg-type]
        return Slo("strict", limit_s).broken(seen)

    assert broken(answered) == []
    assert broken(answered, refused) == ["1 of 2 requests not answered"]
    assert broken(answered, limit_s=0.05) == ["P99 between tokens 100 ms > 50 ms"]
    assert broken(answered, unloaded_s=0.5) == ["median queueing 2.50 s > 2 s"]
    assert len(broken(refused)) == 3


@pytest.mark.parametrize(
    ("bounds", "counts", "said"),
    [
        ((1.5, 2.0, 2.5), (0.0, 4.0, 4.0, 4.0), None),
        ((1.5, 2.0, 2.5), (0.0, 1.0, 4.0, 4.0), "median queueing 2–2.5 s > 2 s"),
        ((1.5, 2.0, 2.5), (0.0, 1.0, 1.0, 4.0), "median queueing >2.5 s > 2 s"),
        ((1.0, 3.0), (0.0, 4.0, 4.0), "median queueing 1–3 s may be > 2 s"),
        ((1.0,), (0.0, 4.0), "median queueing >1 s may be > 2 s"),
    ],
)
def test_a_median_out_of_a_histogram_keeps_the_limit_where_its_bucket_does(
    bounds: tuple[float, ...], counts: tuple[float, ...], said: str | None
) -> None:
    run = Run((record_of([(3.0, 1), (3.1, 1)]),), 1, 4.0, False)
    seen = figures([run], Histogram((*bounds, math.inf), counts), Unloaded((), None))
    assert Slo("strict", 0.2).broken(seen) == ([] if said is None else [said])


REQUESTS = 120


def search_on(*sides: ModelSide, count: int = REQUESTS, **settings: float) -> list[Capacity]:
    load = Load(requests=tuple(simple_requests(count, max_tokens=20)), salt="s", prime=False)
    return run_virtually(
        search_in_turns(
            [Results(side) for side in sides],  # type: ignore[arg-type]
            load,
            lambda rate, sent: poisson(rate, sent, 1),
            SLOS,
            Search(**{"first": 0.5, "tries": 12, **settings}),  # type: ignore[arg-type]
            stop=asyncio.Event(),
            say=lambda _line: None,
        )
    )


SLOS = (Slo("strict", 0.05), Slo("relaxed", 0.25))  # 5 and 25 iterations of 10 ms


@pytest.fixture(scope="module")
def searched() -> list[Capacity]:
    return search_on(ModelSide("small", slots=2), ModelSide("large", slots=12))


def test_found_rates_hold_and_those_just_above_fail(searched: list[Capacity]) -> None:
    for one in searched:
        for slo in SLOS:
            low, high = one.bracket(slo)
            assert low is not None
            assert high is not None
            assert high <= low * 1.1
            verdicts = dict(one.verdicts(slo))
            assert verdicts[low]
            assert not verdicts[high]


def test_more_slots_sustain_more_where_the_limit_allows_it(searched: list[Capacity]) -> None:
    small, large = searched
    strict, relaxed = SLOS
    assert large.bracket(relaxed)[0] > 2 * small.bracket(relaxed)[0]
    assert large.bracket(relaxed)[0] > large.bracket(strict)[0]  # twelve at a time make tokens 6.5 times as slow


def test_too_few_requests_to_show_a_rate_are_said_to_be(searched: list[Capacity]) -> None:
    small, _ = searched
    assert not any(small.too_short(slo) for slo in SLOS)
    (few,) = search_on(ModelSide("large", slots=12), count=8)
    assert few.too_short(SLOS[1])
    (unfailed,) = search_on(ModelSide("side"), tries=1)
    assert unfailed.bracket(SLOS[0]) == (1.0, None)
    assert not unfailed.too_short(SLOS[0])  # 120 s of requests: the report says that no tried rate failed


def test_every_try_is_kept_with_its_run_and_shared_by_the_limits() -> None:
    (one,) = search_on(ModelSide("side"))
    assert [a_try.run for a_try in one.tries] == [name for name, _, _ in one.results.runs]
    assert len({a_try.rate for a_try in one.tries}) == len(one.tries)
    assert sum(one.spent.values()) == len(one.tries)


def test_the_number_of_tries_is_a_bound_for_each_limit() -> None:
    (one,) = search_on(ModelSide("side"), tries=2)
    assert 2 <= len(one.tries) <= 4
    assert max(one.spent.values()) <= 2


def test_rates_change_by_the_step_until_one_holds_and_one_fails() -> None:
    search = Search(first=2.0, step=1.5)
    assert search.next_rate([]) == 2.0
    assert search.next_rate([(2.0, True)]) == 3.0
    assert search.next_rate([(2.0, False)]) == pytest.approx(2.0 / 1.5)
    assert search.next_rate([(2.0, True), (3.0, False)]) == pytest.approx(math.sqrt(6.0))


def test_tries_of_a_given_time_send_as_many_requests_as_come_in_it() -> None:
    (one,) = search_on(ModelSide("side"), try_s=100.0)
    sent = {a_try.rate: a_try.seen.planned for a_try in one.tries}
    assert sent == {rate: min(REQUESTS, round(100 * rate)) for rate in sent}
    assert len(set(sent.values())) > 2
    assert Search(first=1.0, try_s=0.1).requests_at(0.5, REQUESTS) == 1  # never 0


def test_a_server_that_refuses_holds_at_no_rate() -> None:
    (one,) = search_on(ModelSide("side", refused_from=REQUESTS - 1), tries=3, first=50.0)
    assert len(one.tries) == 6
    for slo in SLOS:
        assert one.bracket(slo)[0] is None


def test_no_slower_rate_is_tried_where_requests_hardly_meet() -> None:
    """Requests take 0.7 s each: with fourteen in a hundred seconds, 0.1 of them are under way on average."""
    (one,) = search_on(ModelSide("side", refused_from=REQUESTS - 1))
    assert [a_try.rate for a_try in one.tries] == [0.5, 0.25, 0.125]
    assert [a_try.busy < 0.1 for a_try in one.tries] == [False, False, True]
    assert one.ended is None  # another limit might hold: here none does


def test_the_search_ends_where_a_server_does_not_show_what_is_judged() -> None:
    side = ModelSide("side")
    side.unloaded = Unloaded((), 0.01)
    (one,) = search_on(side)
    assert len(one.tries) == 1
    assert str(one.ended).startswith("the server tells neither its queueing delays")
    single = record_of([(0.5, 1)], prompt_tokens=100)
    seen = figures([Run((single,), 1, 4.0, False)], None, Unloaded(((100, 0.5),), None))
    assert str(never_known(seen, 2.0)).startswith("no answer has two tokens")


@pytest.mark.parametrize(
    ("bounds", "counts", "said"),
    [
        ((5.0, 30.0, math.inf), (3.0, 3.0, 3.0), "no bound up to 2 s, the limit: its first bucket ends at 5 s"),
        ((math.inf,), (3.0,), "no bound up to 2 s, the limit"),
        ((5.0, 30.0, math.inf), (0.0, 3.0, 3.0), None),  # not seen yet
        ((2.0, 5.0, math.inf), (0.0, 3.0, 3.0), None),
        ((0.3, 5.0, math.inf), (3.0, 3.0, 3.0), None),
    ],
)
def test_a_histogram_without_a_bound_up_to_the_limit_ends_the_search(
    bounds: tuple[float, ...], counts: tuple[float, ...], said: str | None
) -> None:
    record = record_of([(0.5, 1), (0.6, 1)], prompt_tokens=100)
    seen = figures([Run((record,), 1, 4.0, False)], Histogram(bounds, counts), Unloaded(((100, 0.5),), 0.01))
    found = never_known(seen, 2.0)
    assert (found is None) is (said is None)
    assert said is None or said in str(found)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (
            [(Outcome.OK, ""), (Outcome.REFUSED, "HTTP 400: too long")],
            "1 of 2 requests are refused at any rate: HTTP 400",
        ),
        ([(Outcome.FAILED, "no route"), (Outcome.REFUSED, "HTTP 503: away")], "the server answers nothing: HTTP 503"),
        ([(Outcome.OK, ""), (Outcome.FAILED, "broke off")], None),
        ([(Outcome.TIMEOUT, "not answered"), (Outcome.FAILED, "broke off")], None),
        *([([(Outcome.OK, ""), (Outcome.REFUSED, f"HTTP {status}: later")], None) for status in (408, 425, 429, 500)]),
        ([], None),
    ],
)
def test_what_a_slower_rate_would_not_mend(outcomes: list[tuple[Outcome, str]], said: str | None) -> None:
    records = [record_of([], outcome=outcome, reason=reason) for outcome, reason in outcomes]
    found = whatever_the_rate(records)
    assert (found is None) == (said is None)
    assert said is None or str(found).startswith(said)


class LateSide(ModelSide):
    """A server whose client sends at most one request a second."""

    async def run(
        self, requests: list[Request], schedule: Schedule, *, stop: asyncio.Event, report: Report | None
    ) -> Measured:
        measured = await super().run(requests, schedule, stop=stop, report=report)
        records = tuple(
            replace(record, sent_s=max(record.sent_s, float(number)))
            for number, record in enumerate(sorted(measured.run.records, key=lambda record: record.sent_s))
        )
        return replace(measured, run=replace(measured.run, records=records))


def test_a_rate_that_the_client_did_not_send_at_is_not_judged() -> None:
    late, other = search_on(LateSide("late", slots=12), ModelSide("other", slots=12))
    assert [a_try.rate for a_try in late.tries] == [0.5, 1.0]
    assert re.fullmatch(
        r"2 requests/s: this client is too slow: requests due within \d+\.\d\d s were sent within 119\.00 s",
        str(late.ended),
    )
    assert late.bracket(SLOS[0]) == (1.0, None)
    assert other.ended is None
    assert (other.bracket(SLOS[0])[0] or 0.0) > 1.0


@pytest.mark.parametrize(
    ("due_s", "sent_s", "late"),
    [(10.0, 10.49, False), (10.0, 10.51, True), (0.1, 0.149, False), (0.1, 0.151, True), (None, 100.0, False)],
)
def test_a_client_is_too_slow_if_it_is_behind_by_a_share_of_the_time(
    due_s: float | None, sent_s: float, late: bool
) -> None:
    one = replace(record_of([(0.5, 1)]), due_s=due_s, sent_s=sent_s)
    assert (sent_too_late([one]) is not None) is late


def test_the_search_on_a_server_that_answers_nothing_ends_and_others_go_on() -> None:
    gone, other = search_on(ModelSide("gone", refused_from=0), ModelSide("other", slots=2))
    assert len(gone.tries) == 1
    assert gone.ended == "the server answers nothing: HTTP 429: full"
    assert other.ended is None
    assert other.bracket(SLOS[0])[0] is not None


def test_an_interrupted_search_keeps_its_tries_and_judges_no_cut_off_run() -> None:
    async def interrupted() -> list[Capacity]:
        stop = asyncio.Event()
        load = Load(requests=tuple(simple_requests(REQUESTS, max_tokens=20)), salt="s", prime=False)
        asyncio.get_running_loop().call_later(300.0, stop.set)  # the runs take about 240, 120 and 60 s
        return await search_in_turns(
            [Results(ModelSide("side"))],  # type: ignore[list-item]
            load,
            lambda rate, count: poisson(rate, count, 1),
            SLOS,
            Search(first=0.5),
            stop=stop,
            say=lambda _line: None,
        )

    (one,) = run_virtually(interrupted())
    assert len(one.results.runs) == len(one.tries) + 1
    assert one.results.runs[-1][2].run.interrupted
    assert len(one.tries) >= 1
