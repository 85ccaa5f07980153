"""Sends one request, reads its streamed answer, and keeps whatever happens."""

import asyncio
import json
from collections.abc import Callable

import aiohttp

from vllm_hybrid_sparse.load.exchange import Exchange, Outcome
from vllm_hybrid_sparse.load.server_text import error_in_body, shortened
from vllm_hybrid_sparse.load.sse import StreamError
from vllm_hybrid_sparse.load.target import Target

_RETRIED_STATUS = {429, 502, 503, 504}
_LEFT_BY_POST = {301, 302, 303}  # what is posted arrives as GET behind these, unlike 307 and 308
_MOST_JSON_BYTES = 2**16  # kept of an answer that is no stream, to find its error

Clock = Callable[[], float]


def new_session() -> aiohttp.ClientSession:
    """Return a session without limits of its own.

    Every request has its own connection, as requests of separate users do. The server could close a kept-alive one at
    the moment it is reused, and that would count as a failure of the server. No cookie is kept: a load balancer's would
    send all requests to one replica.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
    )


class Client:
    """Performs requests on one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.target = target
        self._session = session

    async def perform(self, exchange: Exchange) -> None:
        """Send the request until it is answered or given up, and write to the exchange what the server does.

        If cancelled, it leaves the exchange as it stands.
        """
        now = asyncio.get_running_loop().time
        body = json.dumps(self.target.body(exchange.request)).encode()
        deadline_s = now() + self.target.timeout_s
        wait_s = self.target.retry_wait_s
        for left in reversed(range(self.target.retries + 1)):
            exchange.begin_attempt(now())
            outcome, reason, again_s = await self._attempt(body, exchange, now, deadline_s)
            exchange.end_attempt(outcome, reason)
            if again_s is None or not left or now() + max(wait_s, again_s) >= deadline_s:
                break
            await asyncio.sleep(max(wait_s, again_s))
            wait_s *= 2
        exchange.end(now())

    async def _attempt(
        self, body: bytes, exchange: Exchange, now: Clock, deadline_s: float
    ) -> tuple[Outcome, str, float | None]:
        """Return how an attempt ended, why, and after how many seconds at least a retry may do better; None: never."""
        headers = {"Content-Type": "application/json", **self.target.headers}
        try:
            async with (
                asyncio.timeout_at(deadline_s),
                self._session.post(self.target.url, data=body, headers=headers) as reply,
            ):
                if turned_away := _turned_away(reply):
                    return Outcome.REFUSED, turned_away, None
                if reply.status != 200:
                    again_s = _asked_to_wait_s(reply) if reply.status in _RETRIED_STATUS else None
                    return Outcome.REFUSED, await _refusal(reply), again_s
                await _read(reply, exchange, now)
        except TimeoutError:
            return Outcome.TIMEOUT, f"not answered within {self.target.timeout_s:g} s", None
        except StreamError as error:
            return Outcome.FAILED, str(error), None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the last of an address that is none
            reason = shortened(f"{type(error).__name__}: {error}")
            return Outcome.FAILED, reason, None if exchange.answer.arrivals else 0.0
        return Outcome.OK, "", None


async def _read(reply: aiohttp.ClientResponse, exchange: Exchange, now: Clock) -> None:
    """Read the answer to its end; StreamError if it is none, or makes no sense.

    How the connection ends does not matter once the answer is whole.
    """
    begun = bytearray()
    try:
        async for piece in reply.content.iter_any():
            exchange.answer.feed(piece, now())
            if exchange.answer.done:
                break
            if not exchange.answer.begun and len(begun) < _MOST_JSON_BYTES:
                begun += piece
    except (aiohttp.ClientError, OSError):
        if exchange.answer.finish_reason is None:
            raise
    if reply.content_type == "application/json" and not exchange.answer.begun:
        error = error_in_body(begun.decode(errors="replace"))
        raise StreamError("answered with JSON, not a stream" + (f": {error}" if error else ""))
    exchange.answer.finish()


async def _refusal(reply: aiohttp.ClientResponse) -> str:
    """Return the status and what the server says to it."""
    text = (await reply.read()).decode(errors="replace")  # whatever charset it names: there may be none of that name
    return f"HTTP {reply.status}: {error_in_body(text) or shortened(text)}"


def _turned_away(reply: aiohttp.ClientResponse) -> str | None:
    """Return where the server says that the request belongs, if it got there without its body; None if it did not."""
    for one in reply.history:
        if one.status in _LEFT_BY_POST:
            place = shortened(one.headers.get("Location", ""))
            return f"HTTP {one.status}: is at {place}, by a redirection that drops what is posted: give that URL"
    return None


def _asked_to_wait_s(reply: aiohttp.ClientResponse) -> float:
    """Return the seconds of `Retry-After`; 0 if there is none, or if it is a date."""
    asked = reply.headers.get("Retry-After", "").strip()
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0
