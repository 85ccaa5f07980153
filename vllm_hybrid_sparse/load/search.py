"""The search for each server's capacity, one run per server and turn."""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_hybrid_sparse.load.arrivals import Schedule
from vllm_hybrid_sparse.load.capacity import Search, Slo, bracket
from vllm_hybrid_sparse.load.exchange import Outcome, Record
from vllm_hybrid_sparse.load.figures import LATE_S, Figures
from vllm_hybrid_sparse.load.side import MeasuringError, Say
from vllm_hybrid_sparse.load.turns import Load, Results, in_turn, run_once

_LEAST_SPAN = 5.0  # requests should keep coming for this many times the median end-to-end latency
_LEAST_BUSY = 0.1  # with fewer requests under way on average, a slower rate is no different load
_LATE = 0.05  # a client that is behind by this share of the time, and by LATE_S, did not offer the rate
_REFUSED_AS_SUCH = re.compile(r"HTTP 4(?!08|25|29)\d\d")  # except those that ask to try again


@dataclass(frozen=True, slots=True)
class Try:
    """One rate that was tried; `run` is its name among the server's runs."""

    rate: float
    run: str
    seen: Figures
    busy: float  # requests under way on average, while requests came


@dataclass(slots=True)
class Capacity:
    """The search on one server; written by `search_in_turns`."""

    results: Results
    tries: list[Try] = field(default_factory=list)
    spent: dict[str, int] = field(default_factory=dict)  # runs by the limit that they were done for
    ended: str | None = None  # why the search ended early: no slower rate would do better, or a run could not begin

    def verdicts(self, slo: Slo) -> list[tuple[float, bool]]:
        """Return what was tried, judged by `slo`."""
        return [(one.rate, not slo.broken(one.seen)) for one in self.tries]

    def bracket(self, slo: Slo) -> tuple[float | None, float | None]:
        """Return the highest rate that holds and the lowest that fails; None if none was found."""
        return bracket(self.verdicts(slo))

    def too_short(self, slo: Slo) -> bool:
        """Return whether requests came for too short a time to show that the highest rate that holds is sustained.

        A queue grows with time: a few requests are soon answered at any rate.
        """
        holds, _fails = self.bracket(slo)
        for one in self.tries:
            if one.rate == holds:
                span_s = one.seen.planned / one.rate
                return one.seen.e2e_s.p50 is None or span_s < _LEAST_SPAN * one.seen.e2e_s.p50
        return False

    def end(self, why: str, say: Say) -> None:
        """Try no further rate, and say why."""
        self.ended = why
        say(f"{self.results.side.name}: the search ends: {why}")

    def next_rate(self, slos: Sequence[Slo], search: Search) -> tuple[Slo, float] | None:
        """Return the limit to search for next and the rate to try; None if nothing is left to find out."""
        for slo in slos if self.ended is None else ():
            rate = search.next_rate(self.verdicts(slo))
            if rate is not None and self.spent.get(slo.name, 0) < search.tries and not self.fails_alone(slo):
                return slo, rate
        return None

    def fails_alone(self, slo: Slo) -> bool:
        """Return whether no rate holds and one failed at which requests hardly overlap: slower ones would fail, too."""
        return self.bracket(slo)[0] is None and any(
            one.busy < _LEAST_BUSY and slo.broken(one.seen) for one in self.tries
        )


def whatever_the_rate(records: Sequence[Record]) -> str | None:
    """Return why a try failed for a reason unrelated to its rate, in words; None if a slower one may do better.

    There are two such reasons: the server refuses a request for what it is, or it no longer answers any.
    """
    refused = [one for one in records if one.outcome is Outcome.REFUSED and _REFUSED_AS_SUCH.match(one.reason)]
    if refused:
        return f"{len(refused)} of {len(records)} requests are refused at any rate: {refused[0].reason}"
    if records and not any(one.outcome in (Outcome.OK, Outcome.TIMEOUT) for one in records):
        return f"the server answers nothing: {records[-1].reason}"
    return None


def sent_too_late(records: Sequence[Record]) -> str | None:
    """Return how far behind this client was, in words; None if it offered the rate that it should."""
    timed = [(one.due_s, one.sent_s) for one in records if one.due_s is not None]
    if not timed:
        return None
    due_s, sent_s = map(max, zip(*timed, strict=True))
    if sent_s - due_s <= max(LATE_S, _LATE * due_s):
        return None
    return f"this client is too slow: requests due within {due_s:.2f} s were sent within {sent_s:.2f} s"


def never_known(seen: Figures, median_queueing_s: float) -> str | None:
    """Return what answered requests cannot show at any rate, in words; None if they show all that is judged.

    median_queueing_s   the limit of the median queueing delay
    """
    if not seen.outcomes.get(Outcome.OK.value):
        return None
    if seen.tbt_s.p99 is None:
        return "no answer has two tokens that came apart: there is no time between tokens to judge"
    if seen.queueing.p50_s is None:
        return "the server tells neither its queueing delays nor how long a prompt is, of which they could be estimated"
    if not seen.queueing.shows_within(median_queueing_s):
        return (
            f"the server's histogram of queueing delays has no bound up to {median_queueing_s:g} s, the limit: its "
            f"first bucket ends at {seen.queueing.p50_s:g} s"
        )
    return None


async def search_in_turns(
    all_results: Sequence[Results],
    load: Load,
    schedule_at: Callable[[float, int], Schedule],
    slos: Sequence[Slo],
    search: Search,
    *,
    stop: asyncio.Event,
    say: Say,
) -> list[Capacity]:
    """Search for each server's capacity, one run per server and turn; if `stop` ends it, what was tried is kept.

    The search on a server also ends if a slower rate could not do better (`whatever_the_rate`, `never_known`), or if
    the preparation of a run fails.

    schedule_at   (requests a second, how many) → when they are sent; the requests are the first of the trace
    raises        MeasuringError if that preparation fails before any run on any server
    """
    searches = [Capacity(results) for results in all_results]
    by_results = {id(one.results): one for one in searches}
    turn, open_ = 0, True
    while open_:
        open_ = False
        for results in in_turn(all_results, turn):
            one = by_results[id(results)]
            step = one.next_rate(slos, search)
            if step is None or stop.is_set():
                continue
            open_ = True
            slo, rate = step
            name = f"try {len(one.tries) + 1}"
            part = load.first(search.requests_at(rate, len(load.requests)))
            schedule = schedule_at(rate, len(part.requests))
            try:
                measured = await run_once(results, part, schedule, name, stop=stop, say=say)
            except MeasuringError as error:  # before the run
                if not any(each.runs for each in all_results):
                    raise
                one.end(str(error), say)
                continue
            if measured is None or (measured.run.interrupted and stop.is_set()):
                break  # not the server's doing: the run is kept, but judges nothing
            one.spent[slo.name] = one.spent.get(slo.name, 0) + 1
            records, seen = measured.run.records, results.figures(names=[name])
            if late := sent_too_late(records):
                one.end(f"{rate:.3g} requests/s: {late}", say)  # and judges nothing
                continue
            busy = rate * sum(record.ended_s for record in records) / len(records)
            one.tries.append(Try(rate, name, seen, busy))
            for each in slos:
                broken = "; ".join(each.broken(seen))
                alone = ", though requests hardly meet: no slower rate is tried" if one.fails_alone(each) else ""
                say(f"{results.side.name}: {rate:.3g} requests/s {each.name}: {broken + alone if broken else 'holds'}")
            longest_s = max(each.p50_queueing_s for each in slos)
            if why := whatever_the_rate(records) or never_known(seen, longest_s):
                one.end(why, say)
        turn += 1
    return searches
