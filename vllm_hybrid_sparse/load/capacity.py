"""The highest rate that a server sustains within limits (PSA, section 5, "Capacity evaluation").

A server sustains a rate if every request is answered, the P99 of the time between tokens (all requests pooled) is at
most 5 (strict) or 25 (relaxed) times an unloaded decode iteration, and the median queueing delay is at most 2 s. The
same limits hold for all servers that are compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import check_rate
from vllm_hybrid_sparse.load.figures import Figures

STRICT_ITERATIONS = 5.0
RELAXED_ITERATIONS = 25.0
MEDIAN_QUEUEING_S = 2.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What must hold at a rate for the server to sustain it."""

    name: str
    p99_tbt_s: float
    p50_queueing_s: float = MEDIAN_QUEUEING_S

    def broken(self, seen: Figures) -> list[str]:
        """Return which limits are broken, in words; empty if the rate is sustained.

        If there is no time between tokens or no queueing delay, nothing was shown: that counts as broken.
        """
        reasons = []
        if not seen.all_answered:
            reasons.append(f"{seen.planned - seen.outcomes.get('ok', 0)} of {seen.planned} requests not answered")
        if seen.tbt_s.p99 is None:
            reasons.append("no time between tokens")
        elif seen.tbt_s.p99 > self.p99_tbt_s:
            reasons.append(f"P99 between tokens {seen.tbt_s.p99 * 1e3:.0f} ms > {self.p99_tbt_s * 1e3:.0f} ms")
        above = seen.queueing.median_above(self.p50_queueing_s)
        if seen.queueing.p50_s is None:
            reasons.append("queueing delay not known")
        elif above is not False:
            verb = ">" if above else "may be >"
            reasons.append(f"median queueing {seen.queueing.median()} s {verb} {self.p50_queueing_s:g} s")
        return reasons


def psa_slos(iteration_s: float) -> tuple[Slo, Slo]:
    """Return the strict and the relaxed limits for a decode iteration of `iteration_s`, > 0."""
    if not 0 < iteration_s < math.inf:
        raise ConfigError(f"iteration-ms={iteration_s * 1e3:g}: must be above 0, finite")
    return Slo("strict", STRICT_ITERATIONS * iteration_s), Slo("relaxed", RELAXED_ITERATIONS * iteration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How to search for the highest rate: up or down by `step` until it lies between two rates, then by bisection."""

    first: float  # requests a second, > 0
    step: float = 2.0  # > 1; smaller if `first` is a good guess
    try_s: float | None = None  # how long a try sends requests, > 0, as far as the trace has them; None: all of it
    tolerance: float = 0.1  # ends if the lowest rate that fails is at most (1 + this) times the highest that holds
    tries: int = 8  # most runs for each limit, >= 1; runs done for another limit are used too, but not counted

    def __post_init__(self) -> None:
        check_rate(self.first)
        if not 1 < self.step < math.inf:
            raise ConfigError(f"step={self.step}: must be above 1, finite")
        if self.try_s is not None and not 0 < self.try_s < math.inf:
            raise ConfigError(f"try-seconds={self.try_s}: must be above 0, finite")
        if not 0 < self.tolerance < math.inf:
            raise ConfigError(f"tolerance={self.tolerance}: must be above 0, finite")
        if self.tries < 1:
            raise ConfigError(f"tries={self.tries}: must be at least 1")

    def next_rate(self, tried: Sequence[tuple[float, bool]]) -> float | None:
        """Return the rate to try after those `tried` (rate, whether it held); None if the search is over."""
        low, high = bracket(tried)
        if low is None and high is None:
            return self.first
        if high is None:
            return (low or self.first) * self.step
        if low is None:
            return high / self.step
        return None if high <= low * (1 + self.tolerance) else math.sqrt(low * high)

    def requests_at(self, rate: float, most: int) -> int:
        """Return how many of `most` requests a try at `rate` sends: at least 1."""
        return most if self.try_s is None else max(1, min(most, round(rate * self.try_s)))


def bracket(tried: Sequence[tuple[float, bool]]) -> tuple[float | None, float | None]:
    """Return the highest rate that held below all that failed, and the lowest that failed; None if there is none.

    If a rate held above one that failed, that was luck and does not count.
    """
    high = min((rate for rate, held in tried if not held), default=None)
    return max((rate for rate, held in tried if held and (high is None or rate < high)), default=None), high
