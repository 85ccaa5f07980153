"""One request on a server that misbehaves in every way: nothing that happens is lost from its record."""

import asyncio
import json

import pytest

from tests.load.fake_server import DONE, FakeServer, Reply, answer_in_full, serving, token
from vllm_hybrid_sparse.cli.server import free_port
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.client import Client, new_session
from vllm_hybrid_sparse.load.exchange import Exchange, Outcome, Record
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.target import Address, Api, Target, Usage

REQUEST = Request(prompt="one two three four", max_tokens=3, ignore_eos=True)
WHOLE = Reply([token("a"), token("b"), token("c", "length"), DONE])


def ask(url: str, request: Request = REQUEST, **settings: object) -> Record:
    async def perform() -> Record:
        target = Target(address=Address.parse("url", url), model="tiny", retry_wait_s=0.0, **settings)  # type: ignore[arg-type]
        start_s = asyncio.get_running_loop().time()
        async with new_session() as session:
            exchange = Exchange(0, request)
            await Client(session, target).perform(exchange)
            return exchange.record(start_s)

    return asyncio.run(perform())


def replying(*replies: Reply):
    """Return a function that answers requests with the replies in order; the last reply stays."""
    left = iter(replies)
    last = [replies[-1]]

    def answer(_server: FakeServer, _body: dict[str, object]) -> Reply:
        return next(left, last[0])

    return answer


def test_an_answer_is_read_to_its_end_in_order() -> None:
    with serving() as server:
        record = ask(server.url)
    assert (record.outcome, record.reason, record.output_tokens, record.sendings) == (Outcome.OK, "", 3, 1)
    assert (record.prompt_tokens, record.text, record.finish_reason) == (6, "word1 word2 word3 ", "length")
    times = [0.0, *(arrival.at_s for arrival in record.arrivals), record.ended_s]
    assert times == sorted(times)
    assert len(record.arrivals) == 3


@pytest.mark.parametrize(
    ("request_", "api", "path", "field", "value"),
    [
        (REQUEST, Api.COMPLETIONS, "/v1/completions", "prompt", REQUEST.prompt),
        (Request(prompt=(5, 6), max_tokens=1), Api.COMPLETIONS, "/v1/completions", "prompt", [5, 6]),
        (REQUEST, Api.CHAT, "/v1/chat/completions", "messages", [{"role": "user", "content": REQUEST.prompt}]),
        (
            Request(prompt=({"role": "system", "content": "be brief"},), max_tokens=1),
            Api.CHAT,
            "/v1/chat/completions",
            "messages",
            [{"role": "system", "content": "be brief"}],
        ),
    ],
)
def test_every_kind_of_prompt_is_posted_as_its_endpoint_takes_it(
    request_: Request, api: Api, path: str, field: str, value: object
) -> None:
    with serving() as server:
        record = ask(server.url, request_, api=api, api_key="secret", extra_body={"top_k": 1})
        (body,) = server.requests
        assert server.headers[0]["Authorization"] == "Bearer secret"
    assert record.ok
    assert (body["path"], body[field]) == (path, value)
    assert (body["stream"], body["temperature"], body["top_k"], body["model"]) == (True, 0, 1, "tiny")
    assert body.get("ignore_eos", False) is request_.ignore_eos


@pytest.mark.parametrize(
    ("usage", "options"),
    [
        (Usage.EACH_CHUNK, {"include_usage": True, "continuous_usage_stats": True}),
        (Usage.TOTAL, {"include_usage": True}),
        (Usage.NONE, None),
    ],
)
def test_usage_is_asked_for_as_the_server_takes_it(usage: Usage, options: object) -> None:
    with serving() as server:
        assert ask(server.url, usage=usage).output_tokens == 3
        assert server.requests[0].get("stream_options") == options


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_is_kept_with_status_and_text_and_not_repeated(status: int) -> None:
    with serving(replying(Reply([b'{"error":\n "too long"}'], status=status))) as server:
        record = ask(server.url, retries=3)
        assert len(server.requests) == 1
    assert (record.outcome, record.reason) == (Outcome.REFUSED, f"HTTP {status}: too long")
    assert (record.sendings, record.arrivals) == (1, ())


def test_the_message_of_a_long_refusal_is_kept_wherever_it_stands() -> None:
    body = json.dumps({"detail": None, "request": "x" * 400, "error": {"code": 7, "message": "the context is full"}})
    with serving(replying(Reply([body.encode()], status=400))) as server:
        assert ask(server.url).reason == "HTTP 400: the context is full"


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirection_that_drops_the_prompt_is_refused_with_its_place(status: int) -> None:
    """Clients follow these with GET, without a body."""
    with (
        serving() as there,
        serving(replying(Reply(status=status, headers={"Location": f"{there.url}/v1/completions"}))) as server,
    ):
        record = ask(server.url, retries=2)
        assert not there.requests
    assert (record.outcome, record.sendings) == (Outcome.REFUSED, 1)
    assert record.reason.startswith(f"HTTP {status}: is at {there.url}/v1/completions, ")


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirection_that_keeps_the_prompt_is_followed(status: int) -> None:
    with (
        serving() as there,
        serving(replying(Reply(status=status, headers={"Location": f"{there.url}/v1/completions"}))) as server,
    ):
        assert ask(server.url).output_tokens == 3
        assert len(there.requests) == 1


def test_a_busy_server_is_asked_again_and_every_attempt_kept() -> None:
    with serving(replying(Reply(status=503), Reply(status=429), WHOLE)) as server:
        record = ask(server.url, retries=5)
    assert [attempt.outcome for attempt in record.attempts] == [Outcome.REFUSED, Outcome.REFUSED, Outcome.OK]
    assert (record.ok, record.sendings, record.output_tokens) == (True, 3, 3)
    begun = [attempt.begun_s for attempt in record.attempts]
    assert begun[0] == 0.0 < begun[1] < begun[2]
    assert record.ttft_s is not None
    assert record.ttft_s > begun[-1]  # the time of earlier attempts counts


@pytest.mark.parametrize(("asked", "sendings"), [("0", 2), ("soon", 2), ("9", 1)])
def test_a_server_is_not_asked_again_before_the_time_it_names(asked: str, sendings: int) -> None:
    """Waiting nine seconds would exceed the request's time limit."""
    with serving(replying(Reply(status=503, headers={"Retry-After": asked}), WHOLE)) as server:
        record = ask(server.url, retries=1, timeout_s=5.0)
    assert record.sendings == sendings
    assert record.ok is (sendings == 2)


def test_attempts_end_at_their_number() -> None:
    with serving(replying(Reply(status=503))) as server:
        record = ask(server.url, retries=2)
        assert len(server.requests) == 3
    assert (record.outcome, record.sendings) == (Outcome.REFUSED, 3)


def test_without_retries_a_busy_server_is_asked_once() -> None:
    with serving(replying(Reply(status=503), WHOLE)) as server:
        assert ask(server.url).outcome is Outcome.REFUSED


def test_a_connection_that_breaks_after_a_token_fails_and_is_not_made_again() -> None:
    with serving(replying(Reply([token("a")], then="break"), WHOLE)) as server:
        record = ask(server.url, retries=3)
        assert len(server.requests) == 1
    assert record.outcome is Outcome.FAILED
    assert len(record.arrivals) == 1
    assert record.text == "a"


def test_a_connection_that_breaks_before_a_token_is_made_again() -> None:
    with serving(replying(Reply(then="break"), WHOLE)) as server:
        record = ask(server.url, retries=1)
    assert [attempt.outcome for attempt in record.attempts] == [Outcome.FAILED, Outcome.OK]


def test_a_server_that_is_not_there_fails_with_its_reason() -> None:
    record = ask(f"http://127.0.0.1:{free_port()}", retries=2)
    assert (record.outcome, record.sendings) == (Outcome.FAILED, 3)
    assert "ClientConnectorError" in record.reason


def test_a_time_out_keeps_what_came_and_leaves_the_server() -> None:
    with serving(replying(Reply([token("a"), token("b")], then="hang"))) as server:
        record = ask(server.url, timeout_s=0.5, retries=3)
        assert server.gone.wait(10)
        assert len(server.requests) == 1
    assert (record.outcome, record.reason) == (Outcome.TIMEOUT, "not answered within 0.5 s")
    assert record.text == "ab"
    assert not record.ok


@pytest.mark.parametrize("then", ["break", "hang"])
def test_what_becomes_of_the_connection_after_a_whole_answer_does_not_matter(then: str) -> None:
    with serving(replying(Reply(WHOLE.pieces, then=then))) as server:
        record = ask(server.url, timeout_s=60.0)
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 3)
    assert record.ended_s < 30


def test_a_connection_that_breaks_after_the_finish_reason_leaves_a_whole_answer() -> None:
    with serving(replying(Reply([token("a"), token("b", "stop")], then="break"))) as server:
        record = ask(server.url)
    assert (record.outcome, record.text) == (Outcome.OK, "ab")


def test_an_address_that_a_redirection_makes_up_fails_its_request_alone() -> None:
    with serving(replying(Reply(status=307, headers={"Location": "http://a..b/"}))) as server:
        record = ask(server.url)
    assert record.outcome is Outcome.FAILED
    assert record.reason


def test_a_malformed_stream_fails_with_what_was_wrong() -> None:
    with serving(replying(Reply([token("a"), b"data: {oops\n\n"]))) as server:
        record = ask(server.url)
    assert record.outcome is Outcome.FAILED
    assert "not JSON: '{oops'" in record.reason


@pytest.mark.parametrize("body", [b'{"choices": [{"text": "a", "finish_reason": "stop"}]}', b'{"choices": []}\n'])
def test_an_answer_that_is_no_stream_is_said_to_be_none(body: bytes) -> None:
    with serving(replying(Reply([body], headers={"Content-Type": "application/json; charset=utf-8"}))) as server:
        record = ask(server.url)
    assert (record.outcome, record.reason) == (Outcome.FAILED, "answered with JSON, not a stream")


def test_an_error_in_an_answer_that_is_no_stream_is_kept() -> None:
    body = b'{"error": {"message": "no worker is ready"}}'
    with serving(replying(Reply([body], headers={"Content-Type": "application/json"}))) as server:
        record = ask(server.url)
    assert record.outcome is Outcome.FAILED
    assert record.reason == "answered with JSON, not a stream: no worker is ready"


def test_a_refusal_in_an_unknown_charset_is_read() -> None:
    refusal = Reply([b"too long"], status=400, headers={"Content-Type": "text/plain; charset=base64"})
    with serving(replying(refusal)) as server:
        record = ask(server.url)
    assert (record.outcome, record.reason) == (Outcome.REFUSED, "HTTP 400: too long")


def test_a_stream_is_read_whatever_it_is_called() -> None:
    with serving(replying(Reply(WHOLE.pieces, headers={"Content-Type": "application/json"}))) as server:
        assert ask(server.url).output_tokens == 3


def test_a_stream_that_ends_early_fails_whatever_it_held() -> None:
    with serving(replying(Reply([token("a"), token("b")]))) as server:
        record = ask(server.url)
    assert (record.outcome, len(record.arrivals)) == (Outcome.FAILED, 2)


def test_a_cancelled_request_leaves_the_server_and_can_be_recorded() -> None:
    async def cancel(url: str) -> Record:
        now = asyncio.get_running_loop().time
        target = Target(address=Address.parse("url", url), model="tiny")
        async with new_session() as session:
            exchange = Exchange(0, REQUEST)
            task = asyncio.create_task(Client(session, target).perform(exchange))
            while not exchange.answer.arrivals:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            exchange.abort(now())
            return exchange.record(0.0)

    with serving(replying(Reply([token("a")], then="hang"))) as server:
        record = asyncio.run(cancel(server.url))
        assert server.gone.wait(10)
    assert (record.outcome, record.text) == (Outcome.ABORTED, "a")


def test_answers_in_odd_pieces_are_the_same() -> None:
    whole = b"".join(answer_in_full(None, {"prompt": "a b", "max_tokens": 4}).pieces)
    pieces = [whole[start : start + 7] for start in range(0, len(whole), 7)]
    with serving(replying(Reply(pieces))) as server:
        assert ask(server.url).text == "word1 word2 word3 word4 "


@pytest.mark.parametrize(
    ("text", "name", "root"),
    [
        ("http://host:80", "host:80", "http://host:80"),
        ("http://host:80/v1/", "host:80", "http://host:80"),
        ("ours=https://host/base/v1", "ours", "https://host/base"),
    ],
)
def test_an_address_may_have_a_name_and_the_api_s_path(text: str, name: str, root: str) -> None:
    assert Address.parse("url", text) == Address(name, root)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host/?a=1",
        "http://[::1",
        "http://a]b",
        "http://[zz]",
        "http://h\u2100/",
        "http://a..b:80",
        "ours=http://[::1",
    ],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^vs=.*: must be http://HOST"):
        Address.parse("vs", text)


@pytest.mark.parametrize(("api", "prompt"), [(Api.CHAT, (1, 2)), (Api.COMPLETIONS, ({"role": "user"},))])
def test_a_prompt_that_the_endpoint_has_no_field_for_is_refused(api: Api, prompt: tuple[object, ...]) -> None:
    target = Target(address=Address("a", "http://a"), model="tiny", api=api)
    with pytest.raises(ConfigError, match=f"api={api}: has no prompts of"):
        target.check(Request(prompt=prompt, max_tokens=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["n", "best_of", "stream", "max_tokens", "prompt", "messages", "stream_options", "model", "max_completion_tokens"],
)
def test_further_fields_are_none_of_those_that_are_measured_by(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^extra-body={name}: must be none of "):
        Target(address=Address("a", "http://a"), model="tiny", extra_body={"top_k": 1, name: None})


@pytest.mark.parametrize("settings", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"retries": -1}])
def test_settings_of_a_target_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Target(address=Address("a", "http://a"), model="tiny", **settings)  # type: ignore[arg-type]
