"""One run: requests are sent by a schedule, and every one is accounted for."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_hybrid_sparse.load.arrivals import ClosedLoop, Schedule
from vllm_hybrid_sparse.load.exchange import Exchange, Record
from vllm_hybrid_sparse.load.requests import Request

_PROGRESS_INTERVAL_S = 5.0


class Performer(Protocol):
    """Sends a request: a client, or a model of a server in tests."""

    async def perform(self, exchange: Exchange) -> None:
        """Send the request and write what happens to `exchange`, which is over when this returns."""


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen; requests of the trace that are missing in `records` were not sent."""

    records: tuple[Record, ...]  # in the order of the trace
    planned: int  # requests of the trace
    duration_s: float  # from the start to the end of the last request
    interrupted: bool
    sources: Mapping[str | None, int] = field(default_factory=dict)  # the planned requests by source, if known


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run has come."""

    passed_s: float
    planned: int
    sent: int
    running: int
    done: int
    failed: int

    def line(self) -> str:
        """Return this in words."""
        rate = self.done / self.passed_s if self.passed_s else 0.0
        return (
            f"{self.passed_s:6.0f} s: sent {self.sent} of {self.planned}, running {self.running}, done {self.done}, "
            f"failed {self.failed}, {rate:.2f} requests/s"
        )


Report = Callable[[Standing], None]


@dataclass(slots=True)
class _Course:
    """The state of a run under way; written by the tasks of `run_load`, all on one event loop."""

    requests: Sequence[Request]
    start_s: float
    begun: list[Exchange] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def close(self, exchange: Exchange) -> None:
        self.records.append(exchange.record(self.start_s))

    def standing(self, now_s: float) -> Standing:
        done = sum(record.ok for record in self.records)
        return Standing(
            passed_s=now_s - self.start_s,
            planned=len(self.requests),
            sent=len(self.begun),
            running=len(self.begun) - len(self.records),
            done=done,
            failed=len(self.records) - done,
        )


async def run_load(
    client: Performer,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    stop: asyncio.Event | None = None,
    report: Report | None = None,
    interval_s: float = _PROGRESS_INTERVAL_S,
) -> Run:
    """Send `requests` as `schedule` says and return what became of them.

    schedule   an OpenLoop with as many times as there are requests, or a ClosedLoop
    stop       once set, nothing more is sent; requests under way are cut off, and what came of them is kept
    report     is told how the run stands every `interval_s`, and at its end

    The clock is the event loop's.
    """
    now = asyncio.get_running_loop().time
    stop = stop or asyncio.Event()
    course = _Course(requests, start_s=now())
    sending = asyncio.create_task(_send_all(client, course, schedule))
    stopped = asyncio.create_task(stop.wait())
    showing = asyncio.create_task(_show(course, report, interval_s)) if report else None
    try:
        await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
    finally:
        await _cancel(sending, stopped, showing)
    for exchange in course.begun:
        if not exchange.over:
            exchange.abort(now())
            course.close(exchange)
    if report:
        report(course.standing(now()))
    records = sorted(course.records, key=lambda record: record.index)
    ends_s = [record.sent_s + record.ended_s for record in records]
    interrupted = len(records) < len(requests) or any(record.outcome == "aborted" for record in records)
    sources = Counter(request.source for request in requests)
    return Run(tuple(records), len(requests), max(ends_s, default=0.0), interrupted, sources)


async def _send_all(client: Performer, course: _Course, schedule: Schedule) -> None:
    async def perform(index: int, due_s: float | None = None) -> None:
        exchange = Exchange(index, course.requests[index], due_s)
        course.begun.append(exchange)
        await client.perform(exchange)
        course.close(exchange)

    if isinstance(schedule, ClosedLoop):
        indices = iter(range(len(course.requests)))

        async def ask_in_turn() -> None:
            for index in indices:
                await perform(index)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(schedule.clients, len(course.requests))):
                group.create_task(ask_in_turn())
        return
    now = asyncio.get_running_loop().time
    async with asyncio.TaskGroup() as group:
        for index, due_s in zip(range(len(course.requests)), schedule.due_s, strict=True):
            wait_s = course.start_s + due_s - now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(perform(index, due_s))


async def _show(course: _Course, report: Report, interval_s: float) -> None:
    now = asyncio.get_running_loop().time
    while True:
        await asyncio.sleep(interval_s)
        report(course.standing(now()))


async def _cancel(*tasks: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel tasks and wait until they have ended; their errors are raised where their results are awaited."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
