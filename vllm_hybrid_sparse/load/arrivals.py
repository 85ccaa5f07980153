"""When requests are sent: by a clock, whatever the server does, or by clients that wait for their answer."""

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.requests import Request


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Request i is sent `due_s[i]` seconds after the start, however many are unanswered; ascending."""

    due_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each of `clients` (> 0) sends its next request when it has the answer to the previous one."""

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ConfigError(f"clients={self.clients}: must be at least 1")


Schedule = OpenLoop | ClosedLoop


def check_rate(rate: float) -> None:
    """Raise ConfigError unless `rate` is above 0 and finite."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate={rate}: must be above 0 requests a second, finite")


def poisson(rate: float, count: int, seed: int) -> OpenLoop:
    """Return `count` arrivals of a Poisson process of `rate` requests a second, the last exactly at count / rate.

    That is a Poisson process conditioned on the time of its last arrival, so the rate offered is the one asked for; of
    32 arrivals that are not rescaled it differs by a sixth (standard deviation). `vllm bench serve` rescales, too. The
    same seed gives the same pattern at every rate, stretched in time by 1 / rate. So two runs can differ in nothing but
    the rate, or nothing but the server.
    """
    check_rate(rate)
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    at = tuple(itertools.accumulate(rng.expovariate(1.0) for _ in range(count)))
    return OpenLoop(tuple(one / at[-1] * (count / rate) for one in at))


def seed_of_round(seed: int, number: int) -> int:
    """Return the seed of the arrivals of a round, from 0: no two (seed, number) share one, as seed + number would."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8])


def recorded(requests: Sequence[Request], speed: float = 1.0) -> OpenLoop:
    """Return the arrival times that a trace was recorded with, `speed` times as fast, from its first request on.

    Raises ConfigError if a request has no time, or an earlier one than its predecessor.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed={speed}: must be above 0, finite")
    due_s: list[float] = []
    for index, request in enumerate(requests):
        if request.arrival_s is None:
            raise ConfigError(f"recorded-times: request {index} of the trace has no arrival_s")
        after_s = request.arrival_s - (requests[0].arrival_s or 0.0)
        if due_s and after_s / speed < due_s[-1]:
            raise ConfigError(f"recorded-times: request {index} of the trace arrives before the one in front of it")
        due_s.append(after_s / speed)
    return OpenLoop(tuple(due_s))


def by_arrival(traces: Sequence[Sequence[Request]]) -> list[Request]:
    """Return the requests of several recorded traces in the order in which they arrived, by one clock.

    Their times are not shifted against each other: a trace that begins a minute later than the other one is begun a
    minute later. `recorded` then starts with the first request of all.

    Raises ConfigError as `recorded` does, for each trace separately.
    """
    for trace in traces:
        recorded(trace)
    return sorted(itertools.chain(*traces), key=lambda request: request.arrival_s or 0.0)
