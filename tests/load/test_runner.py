"""One run, in virtual time: when requests go out, and that every one of them is accounted for."""

import asyncio
import itertools

import pytest

from tests.load.model_server import ModelServer, model_run, simple_requests
from tests.load.virtual_time import run_virtually
from vllm_hybrid_sparse.load.arrivals import ClosedLoop, OpenLoop, poisson
from vllm_hybrid_sparse.load.exchange import Exchange, Outcome
from vllm_hybrid_sparse.load.runner import Run, Standing, run_load


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    server, schedule = ModelServer(slots=1, prefill_s=100.0), poisson(2.0, 30, 0)
    run = model_run(server, simple_requests(30), schedule)
    assert server.sent_s == pytest.approx(list(schedule.due_s))
    assert [record.lag_s for record in run.records] == pytest.approx([0.0] * 30, abs=1e-6)
    assert server.peak == 30


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_a_closed_loop_never_has_more_under_way_than_clients(clients: int) -> None:
    server = ModelServer(slots=100)
    run = model_run(server, simple_requests(20), ClosedLoop(clients))
    assert server.peak == min(clients, 20)
    assert [record.index for record in run.records] == list(range(20))
    assert sorted(request.prompt for request in server.asked) == sorted(r.prompt for r in simple_requests(20))


def test_a_client_of_a_closed_loop_asks_again_when_it_has_its_answer() -> None:
    server = ModelServer(slots=1, prefill_s=1.0, token_s=0.5)
    model_run(server, simple_requests(4, max_tokens=3), ClosedLoop(1))
    assert server.sent_s == pytest.approx([0.0, 2.0, 4.0, 6.0])


def test_times_are_those_of_the_server_to_the_letter() -> None:
    server = ModelServer(prefill_s=0.5, token_s=0.25, slowdown=0.0)
    run = model_run(server, simple_requests(2, max_tokens=3), OpenLoop((1.0, 10.0)))
    for record in run.records:
        assert record.ttft_s == pytest.approx(0.5)
        assert record.gaps_s == pytest.approx([0.25, 0.25])
    assert run.duration_s == pytest.approx(11.0)
    assert not run.interrupted


def test_a_run_of_nothing_ends_at_once() -> None:
    assert model_run(ModelServer(), [], OpenLoop(())) == Run((), 0, 0.0, False)
    assert model_run(ModelServer(), [], ClosedLoop(3)).records == ()


def test_refused_requests_stay_in_the_record() -> None:
    run = model_run(ModelServer(refused_from=2), simple_requests(5), ClosedLoop(2))
    assert [record.outcome for record in run.records] == [Outcome.OK] * 2 + [Outcome.REFUSED] * 3
    assert {record.reason for record in run.records if not record.ok} == {"HTTP 429: full"}


def test_a_schedule_of_another_length_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        model_run(ModelServer(), simple_requests(3), OpenLoop((0.0, 1.0)))
    assert caught.group_contains(ValueError)


def test_a_fault_of_ours_is_not_taken_for_the_server_s() -> None:
    class Faulty:
        async def perform(self, exchange: Exchange) -> None:
            raise KeyError(exchange.index)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(run_load(Faulty(), simple_requests(1), ClosedLoop(1)))
    assert caught.group_contains(KeyError)


@pytest.mark.parametrize("schedule", [OpenLoop((0.0, 1.0, 2.0, 3.0, 4.0, 20.0)), ClosedLoop(2)])
def test_an_interrupted_run_keeps_what_was_measured(schedule: OpenLoop | ClosedLoop) -> None:
    server = ModelServer(slots=2, prefill_s=3.0, token_s=0.5, slowdown=0.0)  # answers at 5, two at a time

    async def interrupted() -> Run:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(6.2, stop.set)
        return await run_load(server, simple_requests(6), schedule, stop=stop)

    run = run_virtually(interrupted())
    outcomes = [record.outcome for record in run.records]
    assert outcomes == [Outcome.OK] * 2 + [Outcome.ABORTED] * (3 if isinstance(schedule, OpenLoop) else 2)
    assert (run.interrupted, run.planned, server.running) == (True, 6, 0)
    assert run.duration_s == pytest.approx(6.2)
    assert {record.reason for record in run.records[2:]} == {"the run was interrupted"}


def test_a_run_that_is_stopped_between_two_requests_was_interrupted() -> None:
    async def interrupted() -> Run:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(5.0, stop.set)
        server = ModelServer(prefill_s=1.0, token_s=0.1)
        return await run_load(server, simple_requests(2, max_tokens=2), OpenLoop((0.0, 10.0)), stop=stop)

    run = run_virtually(interrupted())
    assert [record.outcome for record in run.records] == [Outcome.OK]
    assert (run.interrupted, run.planned) == (True, 2)


def test_a_request_cut_off_keeps_its_tokens() -> None:
    async def interrupted() -> Run:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(1.25, stop.set)
        server = ModelServer(prefill_s=1.0, token_s=0.1)
        return await run_load(server, simple_requests(1, max_tokens=50), ClosedLoop(1), stop=stop)

    (record,) = run_virtually(interrupted()).records
    assert [at_s for at_s, _ in record.arrivals] == pytest.approx([1.0, 1.1, 1.2])
    assert (record.outcome, record.output_tokens, record.sendings) == (Outcome.ABORTED, 3, 1)


def test_progress_comes_at_intervals_and_at_the_end_and_adds_up() -> None:
    seen: list[Standing] = []
    server = ModelServer(slots=1, prefill_s=2.0, token_s=0.0, refused_from=5)
    run = run_virtually(run_load(server, simple_requests(6), poisson(2.0, 6, 1), report=seen.append, interval_s=1.0))
    assert [standing.passed_s for standing in seen[:-1]] == pytest.approx(list(range(1, len(seen))))
    assert seen[-1].passed_s == pytest.approx(run.duration_s)
    assert (seen[-1].sent, seen[-1].running, seen[-1].done, seen[-1].failed) == (6, 0, 5, 1)
    for standing in seen:
        assert standing.sent == standing.running + standing.done + standing.failed
    for earlier, later in itertools.pairwise(seen):
        assert earlier.done <= later.done
    assert "sent 6 of 6, running 0, done 5, failed 1" in seen[-1].line()
