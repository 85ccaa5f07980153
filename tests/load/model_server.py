"""A server that is a few timers: it runs `slots` requests at a time, and the more run, the slower each token."""

import asyncio
from dataclasses import dataclass, field

from tests.load.virtual_time import run_virtually
from vllm_hybrid_sparse.load.arrivals import Schedule
from vllm_hybrid_sparse.load.exchange import Exchange, Outcome, Record
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Report, Run, run_load
from vllm_hybrid_sparse.load.side import Measured, Say
from vllm_hybrid_sparse.load.target import Address, Target


@dataclass
class ModelServer:
    """Performs exchanges in virtual time."""

    slots: int = 4
    prefill_s: float = 0.5
    token_s: float = 0.01  # of a request that runs alone
    slowdown: float = 0.5  # what each further running request adds to a token, relative
    refused_from: int | None = None  # requests with this index and above are refused

    running: int = 0
    peak: int = 0
    asked: list[Request] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def perform(self, exchange: Exchange) -> None:
        now = asyncio.get_running_loop().time
        exchange.begin_attempt(now())
        self.asked.append(exchange.request)
        self.sent_s.append(now())
        self.running += 1  # including those that wait
        self.peak = max(self.peak, self.running)
        try:
            if self.refused_from is not None and exchange.index >= self.refused_from:
                exchange.end_attempt(Outcome.REFUSED, "HTTP 429: full")
            else:
                async with self._free:
                    await self._answer(exchange)
                exchange.end_attempt(Outcome.OK)
        finally:
            self.running -= 1
        exchange.end(now())

    async def _answer(self, exchange: Exchange) -> None:
        now = asyncio.get_running_loop().time
        exchange.answer.prompt_tokens = 100
        await asyncio.sleep(self.prefill_s)
        exchange.answer.add(now(), 1)
        for _ in range(exchange.request.max_tokens - 1):
            beside = min(self.running, self.slots) - 1
            await asyncio.sleep(self.token_s * (1 + self.slowdown * beside))
            exchange.answer.add(now(), 1)


class ModelSide:
    """Stands in for a `Side`; its server is a `ModelServer`."""

    def __init__(self, name: str, **model: float) -> None:
        self.target = Target(address=Address(name, f"http://{name}"), model="model", retry_wait_s=0.0)
        self.name = name
        self.version = "1"
        self.server = ModelServer(**model)
        self.unloaded = Unloaded(((100, self.server.prefill_s),), self.server.token_s)
        self.primed: list[int] = []

    async def prime(self, requests: list[Request], *, stop: asyncio.Event, say: Say) -> None:
        assert not stop.is_set()
        say(self.name)
        self.primed.append(len(requests))

    async def run(
        self, requests: list[Request], schedule: Schedule, *, stop: asyncio.Event, report: Report | None
    ) -> Measured:
        return Measured(await run_load(self.server, requests, schedule, stop=stop, report=report), None, 0.0)


def simple_requests(count: int, max_tokens: int = 5) -> list[Request]:
    return [Request(prompt=f"prompt {number}", max_tokens=max_tokens) for number in range(count)]


def model_run(server: ModelServer, requests: list[Request], schedule: Schedule) -> Run:
    return run_virtually(run_load(server, requests, schedule))


def record_of(arrivals: list[tuple[float, int]], request: Request | None = None, **changes: object) -> Record:
    """Return the record of a request that was sent at 10, in a run that began at 8."""
    exchange = Exchange(0, request or Request(prompt="prompt", max_tokens=sum(tokens for _, tokens in arrivals) or 1))
    exchange.begin_attempt(10.0)
    for at_s, tokens in arrivals:
        exchange.answer.add(10.0 + at_s, tokens)
    exchange.answer.prompt_tokens = changes.pop("prompt_tokens", None)  # type: ignore[assignment]
    exchange.end_attempt(changes.pop("outcome", Outcome.OK), str(changes.pop("reason", "")))  # type: ignore[arg-type]
    exchange.end(10.0 + (arrivals[-1][0] if arrivals else 0.0))
    assert not changes
    return exchange.record(8.0)
