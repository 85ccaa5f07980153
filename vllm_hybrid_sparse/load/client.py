"""Sends one request, reads its streamed answer, and keeps whatever happens."""

import asyncio
import json
from collections.abc import Callable

import aiohttp

from vllm_hybrid_sparse.load.exchange import Exchange, Outcome
from vllm_hybrid_sparse.load.sse import StreamError
from vllm_hybrid_sparse.load.target import Target

_RETRIED_STATUS = {429, 502, 503, 504}
_REASON_CHARACTERS = 300

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
                if reply.status != 200:
                    text = " ".join((await reply.text(errors="replace")).split())[:_REASON_CHARACTERS]
                    again_s = _asked_to_wait_s(reply) if reply.status in _RETRIED_STATUS else None
                    return Outcome.REFUSED, f"HTTP {reply.status}: {text}", again_s
                async for piece in reply.content.iter_any():
                    exchange.answer.feed(piece, now())
                if reply.content_type == "application/json" and not exchange.answer.begun:
                    return Outcome.FAILED, "answered with JSON, not a stream", None
                exchange.answer.finish()
        except TimeoutError:
            return Outcome.TIMEOUT, f"not answered within {self.target.timeout_s:g} s", None
        except StreamError as error:
            return Outcome.FAILED, str(error), None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
            return Outcome.FAILED, reason, None if exchange.answer.arrivals else 0.0
        return Outcome.OK, "", None


def _asked_to_wait_s(reply: aiohttp.ClientResponse) -> float:
    """Return the seconds of `Retry-After`; 0 if there is none, or if it is a date."""
    asked = reply.headers.get("Retry-After", "").strip()
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0
