"""What is found out about a server before it is measured."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import aiohttp
import pytest
from yarl import URL

from tests.load.fake_server import FakeServer, Reply, answer_in_full, serving
from vllm_hybrid_sparse.cli.server import free_port
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import ClosedLoop
from vllm_hybrid_sparse.load.client import new_session
from vllm_hybrid_sparse.load.prometheus import QUEUE_TIME
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.side import Measured, MeasuringError, Side, served_model
from vllm_hybrid_sparse.load.target import Address, Api, Target, Usage

PROBE = Request(prompt="a b c d", max_tokens=2)
T = TypeVar("T")


def with_side(url: str, work: Callable[[Side], Awaitable[T]]) -> T:
    async def run() -> T:
        async with new_session() as session:
            return await work(Side(session, Target(address=Address.parse("url", url), model="tiny")))

    return asyncio.run(run())


def model_of(url: str, model: str | None, said: list[str] | None = None) -> str:
    async def run() -> str:
        async with new_session() as session:
            say = (said if said is not None else []).append
            return await served_model(session, Address.parse("url", url), model, None, say=say)

    return asyncio.run(run())


def test_the_only_model_need_not_be_named() -> None:
    with serving() as server:
        assert model_of(server.url, None) == "tiny"
        assert model_of(server.url, "tiny") == "tiny"
        server.models = {"data": [{"id": "a"}, {"id": "b"}]}
        with pytest.raises(ConfigError, match="serves a, b; name one"):
            model_of(server.url, None)


@pytest.mark.parametrize(
    ("models", "status", "why"),
    [
        ({"data": [{"id": "tiny"}]}, 200, "lists tiny"),
        ({"data": []}, 200, "lists no models"),
        ({}, 404, "answers HTTP 404 to GET /v1/models"),
        ("<html>", 200, "something else than a list of models"),
    ],
)
def test_a_model_that_is_named_need_not_be_listed(models: object, status: int, why: str) -> None:
    """Proxies list patterns, and some servers list nothing."""
    said: list[str] = []
    with serving() as server:
        server.models, server.models_status = models, status
        assert model_of(server.url, "other", said) == "other"
    (line,) = said
    assert why in line
    assert line.endswith("; model other is asked for all the same")


def test_a_server_that_is_none_is_named_with_what_it_did() -> None:
    with serving() as server:
        server.models_status = 401
        with pytest.raises(
            MeasuringError, match=r"^url=http://127.0.0.1:.*: answers HTTP 401 to GET /v1/models; name the model"
        ):
            model_of(server.url, None)
        server.models_status = 200
        for answer in ("<html>", {"models": []}, {"data": [{"name": "a"}]}):
            server.models = answer
            with pytest.raises(MeasuringError, match="something else than a list of models"):
                model_of(server.url, None)
    with pytest.raises(MeasuringError, match="cannot be reached"):
        model_of(f"http://127.0.0.1:{free_port()}", None)


@pytest.mark.parametrize(
    ("refused", "left"),
    [([], Usage.EACH_CHUNK), (["continuous_usage_stats"], Usage.TOTAL), (["include_usage"], Usage.NONE)],
)
@pytest.mark.parametrize("status", [400, 422])
def test_the_fullest_usage_that_a_server_takes_is_asked_for(refused: list[str], left: Usage, status: int) -> None:
    def answer(server: FakeServer, body: dict[str, dict[str, object]]) -> Reply:
        if set(refused) & set(body.get("stream_options", {})):
            return Reply([b"unknown field"], status=status)
        return answer_in_full(server, body)

    async def find_out(side: Side) -> Side:
        await side.find_out(PROBE)
        return side

    with serving(answer) as server:
        side = with_side(server.url, find_out)
    assert side.target.usage is left
    assert side.version == '{"version": "0.0"}'


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_a_chat_that_names_another_limit_for_answers_is_asked_by_that(api: Api) -> None:
    said = b'{"error": {"message": "\'max_tokens\' is not supported: use \'max_completion_tokens\' instead."}}'

    def answer(server: FakeServer, body: dict[str, object]) -> Reply:
        if "max_tokens" in body:
            return Reply([said], status=400)
        return answer_in_full(server, {**body, "max_tokens": body["max_completion_tokens"]})

    async def find_out(side: Side) -> Side:
        side.target = replace(side.target, api=api)
        await side.find_out(PROBE)
        return side

    with serving(answer) as server:
        if api is Api.CHAT:
            side = with_side(server.url, find_out)
            assert side.target.usage is Usage.EACH_CHUNK
            assert server.requests[-1]["max_completion_tokens"] == PROBE.max_tokens
            assert len(server.requests) == 2
        else:  # has no such field
            with pytest.raises(MeasuringError, match="is not supported"):
                with_side(server.url, find_out)


def test_a_server_that_refuses_every_request_is_an_error_with_its_answer() -> None:
    with serving(lambda _server, _body: Reply([b"no such model"], status=404)) as server:
        with pytest.raises(MeasuringError, match=r"url=.*/v1/completions: refused \(HTTP 404: no such model\)"):
            with_side(server.url, lambda side: side.find_out(PROBE))
        assert len(server.requests) == 1  # another form of usage would not help


def test_priming_reads_each_group_once_for_a_token() -> None:
    requests = [Request(prompt=f"{group} {n}", max_tokens=9, group=group) for n in range(3) for group in ("x", "y")]
    with serving() as server:
        with_side(server.url, lambda side: side.prime(requests, stop=asyncio.Event(), say=print))
        assert [(body["prompt"], body["max_tokens"]) for body in server.requests] == [("x 0", 1), ("y 0", 1)]


def test_warming_up_measures_one_request_after_another() -> None:
    async def warm_up(side: Side) -> Side:
        await side.warm_up([PROBE, Request(prompt="a " * 40, max_tokens=2)], stop=asyncio.Event(), say=print)
        return side

    with serving() as server:
        unloaded = with_side(server.url, warm_up).unloaded
    assert [tokens for tokens, _ in unloaded.ttft_s] == [6, 60]
    assert unloaded.gap_s is not None


def test_a_request_that_fails_before_the_run_ends_it() -> None:
    with (
        serving(lambda _server, _body: Reply([b"full"], status=503)) as server,
        pytest.raises(MeasuringError) as caught,
    ):
        with_side(server.url, lambda side: side.warm_up([PROBE], stop=asyncio.Event(), say=print))
    assert "refused before the run (HTTP 503: full)" in str(caught.value)


def exposed(count: int) -> str:
    return f'{QUEUE_TIME}_bucket{{le="1.0"}} {count}\n{QUEUE_TIME}_bucket{{le="+Inf"}} {count}\n'


def measure(url: str, retries: int = 0) -> Measured:
    async def run(side: Side) -> Measured:
        side.target = replace(side.target, retries=retries, retry_wait_s=0.0)
        return await side.run([PROBE] * 3, ClosedLoop(1), stop=asyncio.Event(), report=None)

    return with_side(url, run)


def test_the_server_s_queue_times_are_those_of_the_run() -> None:
    def answer(server: FakeServer, body: dict[str, object]) -> Reply:
        server.metrics = exposed(5 + len(server.requests))
        return answer_in_full(server, body)

    with serving(answer) as server:
        server.metrics = exposed(5)
        measured = measure(server.url)
    assert measured.observed is not None
    assert measured.observed.total == 3
    assert len(measured.run.records) == 3


def test_requests_that_the_server_observes_late_are_waited_for() -> None:
    with serving() as server:
        server.metrics = [exposed(5), exposed(6), exposed(6), exposed(8)]
        measured = measure(server.url)
    assert measured.observed is not None
    assert measured.observed.total == 3


@pytest.mark.parametrize("observed", [1, 2, 4, 300])
def test_queue_times_of_other_requests_than_the_run_s_are_not_taken(observed: int) -> None:
    with serving() as server:
        server.metrics = [exposed(5), *[exposed(5 + observed)] * 200]  # another replica's, or others' requests as well
        assert measure(server.url).observed is None


def test_queue_times_count_from_the_first_sending_or_are_not_taken() -> None:
    """The server counts from the sending that it accepted; a client that was refused has waited longer."""

    def answer(server: FakeServer, body: dict[str, object]) -> Reply:
        if len(server.requests) == 2:
            return Reply([b"full"], status=503)
        server.metrics = exposed(5 + len(server.requests) - (len(server.requests) > 2))
        return answer_in_full(server, body)

    with serving(answer) as server:
        server.metrics = exposed(5)
        measured = measure(server.url, retries=1)
    assert [record.sendings for record in measured.run.records] == [1, 2, 1]
    assert all(record.ok for record in measured.run.records)
    assert measured.observed is None


@pytest.mark.parametrize("before", [None, "# nothing\n", exposed(9)])
def test_a_server_without_usable_queue_times_has_none(before: str | None) -> None:
    def answer(server: FakeServer, body: dict[str, object]) -> Reply:
        server.metrics = exposed(1) if before and QUEUE_TIME in before else before  # it counts from the start again
        return answer_in_full(server, body)

    with serving(answer) as server:
        server.metrics = before
        assert measure(server.url).observed is None


def test_sessions_use_a_connection_a_request() -> None:
    async def connector() -> aiohttp.BaseConnector | None:
        async with new_session() as session:
            return session.connector

    found = asyncio.run(connector())
    assert found is not None
    assert found.force_close
    assert found.limit == 0


def test_sessions_keep_no_cookie_that_would_bind_all_requests_to_one_replica() -> None:
    async def kept() -> int:
        async with new_session() as session:
            session.cookie_jar.update_cookies({"replica": "a"}, URL("http://host/"))
            return len(session.cookie_jar)

    assert asyncio.run(kept()) == 0
