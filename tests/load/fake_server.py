"""A small OpenAI-compatible server in a thread, whose replies a test writes."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def token(text: str, finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    """Return a chunk of /v1/completions."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return event(chunk | ({} if usage is None else {"usage": usage}))


@dataclass
class Reply:
    """What a request gets."""

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    then: str = "end"  # or `hang` until the client goes, or `break` off
    before: Callable[[], None] = lambda: None
    headers: dict[str, str] = field(default_factory=dict)


Answer = Callable[["FakeServer", dict[str, Any]], Reply]


def answer_in_full(_server: "FakeServer | None", body: dict[str, Any]) -> Reply:
    """Answer with the tokens and the usage that were asked for. A word of a prompt counts as one and a half tokens."""
    options = body.get("stream_options") or {}
    prompt = body.get("prompt") or " ".join(str(message["content"]) for message in body["messages"])
    prompt_tokens = len(prompt.split()) * 3 // 2 if isinstance(prompt, str) else len(prompt)
    pieces = []
    for number in range(1, body["max_tokens"] + 1):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": number}
        text, finish = f"word{number} ", "length" if number == body["max_tokens"] else None
        choice = {"text": text} if "prompt" in body else {"delta": {"content": text}}
        chunk: dict[str, Any] = {"choices": [choice | {"index": 0, "finish_reason": finish}]}
        pieces.append(event(chunk | ({"usage": usage} if options.get("continuous_usage_stats") else {})))
    if options.get("include_usage"):
        pieces.append(event({"choices": [], "usage": usage}))
    return Reply([*pieces, DONE])


class FakeServer:
    """Keeps what it was asked, and says what the test sets; `requests` are the bodies in order."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.models_status = 200
        self.metrics: str | list[str] | None = None  # of several, each is shown once, and the last one stays
        self.gone = threading.Event()  # a client left before its reply was whole
        self.url = ""
        self._answer = answer

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**26)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/version", self._version)
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_post("/v1/chat/completions", self._complete)
        return application

    async def _models(self, _request: web.Request) -> web.Response:
        if isinstance(self.models, str):
            return web.Response(text=self.models, status=self.models_status)
        return web.json_response(self.models, status=self.models_status)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        if isinstance(self.metrics, str):
            return web.Response(text=self.metrics)
        return web.Response(text=self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0])

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0"})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body | {"path": request.path})
        self.headers.append(dict(request.headers))
        reply = self._answer(self, body)
        reply.before()
        if reply.status != 200:
            return web.Response(status=reply.status, body=b"".join(reply.pieces), headers=reply.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | reply.headers)
        await response.prepare(request)
        try:
            for piece in reply.pieces:
                await response.write(piece)
                await asyncio.sleep(0)
            if reply.then == "hang":
                await asyncio.Event().wait()
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        if reply.then == "break" and request.transport is not None:
            request.transport.close()  # what was written goes out first
        return response


@contextlib.contextmanager
def serving(answer: Answer = answer_in_full) -> Iterator[FakeServer]:
    """Serve on a free port of the loopback address until the end of the block."""
    server = FakeServer(answer)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.0, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
