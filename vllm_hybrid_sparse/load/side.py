"""One server under measurement: probe it, warm it up, and run load on it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from vllm_hybrid_sparse.errors import ConfigError, HybridSparseError
from vllm_hybrid_sparse.load.arrivals import Schedule
from vllm_hybrid_sparse.load.client import Client
from vllm_hybrid_sparse.load.exchange import Exchange, Outcome, Record
from vllm_hybrid_sparse.load.mixes import first_of_groups
from vllm_hybrid_sparse.load.prometheus import QUEUE_TIME, Histogram, histogram
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Report, Run, run_load
from vllm_hybrid_sparse.load.target import MAX_COMPLETION_TOKENS, MAX_TOKENS, Address, Api, Target, Usage

_ASK_TIMEOUT_S = 20.0
_METRICS_LATE_S = 2.0  # a server may observe the last requests a moment after their clients have them
_METRICS_POLL_S = 0.1

Say = Callable[[str], None]


class MeasuringError(HybridSparseError, RuntimeError):
    """A server that cannot be measured; the text begins with its URL."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run on one server."""

    run: Run
    observed: Histogram | None  # the server's queueing delays during it
    begun: float  # seconds since 1970


async def served_model(
    session: aiohttp.ClientSession, address: Address, model: str | None, api_key: str | None, *, say: Say
) -> str:
    """Return the model to ask for: `model`, or the only one that the server has.

    A model that is named but not listed is asked for all the same, and `say` is told: not every server lists every
    name that it answers to. Raises MeasuringError if the server cannot be reached, or if it does not list models and
    none is named; ConfigError if one must be named.
    """
    try:
        served = await _served_models(session, address, api_key)
    except _NoListError as error:
        if model is None:
            raise MeasuringError(f"{error}; name the model") from error
        say(f"{error}; model {model} is asked for all the same")
        return model
    if model is None:
        if len(served) == 1:
            return served[0]
        raise ConfigError(f"model: {address.root} serves {', '.join(served) or 'none'}; name one")
    if model not in served:
        say(f"url={address.root}: lists {', '.join(served) or 'no models'}; model {model} is asked for all the same")
    return model


class _NoListError(Exception):
    """A server that answers GET /v1/models with something other than models."""


async def _served_models(session: aiohttp.ClientSession, address: Address, api_key: str | None) -> list[str]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    url = f"{address.root}/v1/models"
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S), session.get(url, headers=headers) as reply:
            if reply.status != 200:
                raise _NoListError(f"url={address.root}: answers HTTP {reply.status} to GET /v1/models")
            return _model_names(await reply.json(content_type=None))
    except TimeoutError as error:
        raise MeasuringError(f"url={address.root}: did not answer within {_ASK_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise MeasuringError(f"url={address.root}: cannot be reached ({error})") from error
    except ValueError as error:
        raise _NoListError(
            f"url={address.root}: answers GET /v1/models with something else than a list of models"
        ) from error


def _model_names(answer: Any) -> list[str]:
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError("not a list of models") from error


def _not_taken(record: Record) -> bool:
    """Whether the server does not take a request in this form."""
    return record.outcome is Outcome.REFUSED and record.reason.startswith(("HTTP 400", "HTTP 422"))


class Side:
    """A server to be measured, with what is known about it."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.target = target
        self.unloaded = Unloaded((), None)
        self.version: str | None = None
        self._session = session

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.target.address.name

    async def find_out(self, probe: Request) -> None:
        """Send `probe` with the fullest usage that the server accepts, and ask for the server's version.

        If a model takes no `max_tokens` in chats and names `max_completion_tokens`, that is asked for from then on.
        Raises MeasuringError if the server refuses the request in every form, or fails to answer it.
        """
        self.version = await self._server_version()
        record = None
        for usage in Usage:
            self.target = replace(self.target, usage=usage)
            record = await self.ask(probe)
            if _not_taken(record) and self._takes_other_limit(record.reason):
                self.target = replace(self.target, limit_field=MAX_COMPLETION_TOKENS)
                record = await self.ask(probe)
            if not _not_taken(record):
                break
        assert record is not None, "there is at least one way to ask for usage"
        if not record.ok:
            raise MeasuringError(f"url={self.target.url}: {record.outcome} ({record.reason})")

    def _takes_other_limit(self, reason: str) -> bool:
        asked = self.target
        return asked.api is Api.CHAT and asked.limit_field == MAX_TOKENS and MAX_COMPLETION_TOKENS in reason

    async def ask(self, request: Request) -> Record:
        """Send one request alone."""
        start_s = asyncio.get_running_loop().time()
        exchange = Exchange(0, request)
        await Client(self._session, self.target).perform(exchange)
        return exchange.record(start_s)

    async def prime(self, requests: Sequence[Request], *, stop: asyncio.Event, say: Say) -> None:
        """Have the server read the first request of each group, so that the others find their prefix cached."""
        firsts = [replace(request, max_tokens=1) for request in first_of_groups(requests)]
        for number, request in enumerate(firsts, start=1):
            if stop.is_set():
                break
            say(f"{self.name}: reading {request.group} ({number} of {len(firsts)})")
            await self._ask_or_fail(request)

    async def warm_up(self, requests: Sequence[Request], *, stop: asyncio.Event, say: Say) -> list[Record]:
        """Send requests one after another and keep their times as `unloaded`."""
        records = []
        for number, request in enumerate(requests, start=1):
            if stop.is_set():
                break
            say(f"{self.name}: warming up ({number} of {len(requests)})")
            records.append(await self._ask_or_fail(request))
        self.unloaded = Unloaded.of(records)
        return records

    async def run(
        self, requests: Sequence[Request], schedule: Schedule, *, stop: asyncio.Event, report: Report | None
    ) -> Measured:
        """Put the load on the server and return what the clients and the server saw.

        The server's queueing delays are left out if they are of others' requests as well, or if a request was sent
        more than once: the server counts from the sending that it accepted, and the wait before is queueing, too.
        """
        before = await self.queue_times()
        begun = time.time()
        run = await run_load(Client(self._session, self.target), requests, schedule, stop=stop, report=report)
        answered = sum(record.ok for record in run.records)
        if any(record.sendings > 1 for record in run.records):
            return Measured(run, None, begun)
        observed = await self._observed(before, answered)
        sent = sum(record.sendings for record in run.records)
        if observed is not None and not answered <= observed.total <= sent:
            observed = None  # of another replica, or with others' requests in it: the clients' estimate is better
        return Measured(run, observed, begun)

    async def queue_times(self) -> Histogram | None:
        """Return the server's histogram of queueing delays; None if it exposes none."""
        text = await self._get_text(f"{self.target.address.root}/metrics")
        return None if text is None else histogram(text, QUEUE_TIME)

    async def _observed(self, before: Histogram | None, answered: int) -> Histogram | None:
        if before is None:
            return None
        now = asyncio.get_running_loop().time
        deadline_s = now() + _METRICS_LATE_S
        while True:
            after = await self.queue_times()
            if after is None:
                return None
            try:
                observed = after.since(before)
            except ValueError:  # the server was restarted
                return None
            if observed.total >= answered or now() > deadline_s:
                return observed
            await asyncio.sleep(_METRICS_POLL_S)

    async def _ask_or_fail(self, request: Request) -> Record:
        record = await self.ask(request)
        if not record.ok:
            raise MeasuringError(f"url={self.target.url}: {record.outcome} before the run ({record.reason})")
        return record

    async def _server_version(self) -> str | None:
        """Return what vLLM says at /version; None if a server says nothing there."""
        text = await self._get_text(f"{self.target.address.root}/version")
        return None if text is None or len(text) > 200 else text.strip()

    async def _get_text(self, url: str) -> str | None:
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S), self._session.get(url, headers=self.target.headers) as reply:
                return await reply.text(errors="replace") if reply.status == 200 else None
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None
