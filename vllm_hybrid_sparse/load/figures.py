"""The figures of a run, computed from its records.

The definitions are those of `vllm bench serve` (0.32), over the requests that were answered to the end:

ttft         time to first token, from the first sending of the request
tbt          time between tokens (its "itl"): between two arrivals, all requests pooled; tokens that came together are
             one arrival
tpot         of a request: (time from first to last token) / (output tokens - 1), with at least two tokens
e2e          time to the last token
throughput   requests, or tokens, over the time from the start of the run to the end of its last request
goodput      requests a second that keep every limit; a request with fewer than two tokens keeps those on tbt and tpot

They differ from it in three cases. If the first chunk of a chat holds a role but no token, it counts as no token here.
If a request was sent again, its times run from the first sending. If an answer breaks off, the request has failed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.by_source import SourceFigures, by_source
from vllm_hybrid_sparse.load.exchange import Outcome, Record
from vllm_hybrid_sparse.load.percentiles import Distribution, percentile
from vllm_hybrid_sparse.load.prometheus import Histogram
from vllm_hybrid_sparse.load.queueing import Queueing, Unloaded, queueing
from vllm_hybrid_sparse.load.runner import Run

LATE_S = 0.05
"""Later sending than this is told of: latencies count from when a request was sent, not from when it was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that a good request keeps, in milliseconds; None: no limit."""

    ttft: float | None = None
    tbt: float | None = None  # P99 of the request's own times between tokens
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read ``NAME:MS,…``, e.g. ``ttft:2000,tbt:150``."""
        known = [field.name for field in fields(cls)]
        limits: dict[str, float] = {}
        for item in text.split(","):
            name, _, value = item.partition(":")
            if name in limits:
                raise ConfigError(f"{option}={text}: must give {name} once")
            try:
                limits[name] = float(value)
            except ValueError as error:
                raise ConfigError(f"{option}={text}: must be NAME:MS,…, not {item!r}") from error
            if name not in known or not 0 < limits[name] < math.inf:
                raise ConfigError(f"{option}={text}: names are {', '.join(known)}, limits are above 0 ms, finite")
        return cls(**limits)

    def kept_by(self, record: Record) -> bool:
        """Return whether a request was answered within every limit; at the limit counts as within."""
        gaps_s = record.gaps_s
        seen = (
            (self.ttft, record.ttft_s),
            (self.tbt, percentile(gaps_s, 99) if gaps_s else None),
            (self.tpot, record.tpot_s),
            (self.e2e, record.e2e_s),
        )
        return record.ok and all(limit is None or value_s is None or value_s * 1e3 <= limit for limit, value_s in seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run, or several of the same kind together. Times in seconds, rates a second."""

    planned: int
    outcomes: dict[str, int]
    reasons: dict[str, int]  # of attempts that did not end well, including those that were repeated
    not_sent: int
    retries: int
    short_answers: int  # fewer tokens than asked for with ignore_eos
    counted: dict[str, int]  # answered requests, by the source of their number of tokens
    duration_s: float
    requests_per_s: float
    goodput_per_s: float | None  # None without limits
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None  # None if the server does not tell
    output_tokens: int
    most_tokens_together: int
    ttft_s: Distribution
    tbt_s: Distribution
    request_median_tbt_s: Distribution  # distribution over requests of each one's median
    request_p99_tbt_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    lag_s: Distribution  # how late we sent; more than a few ms means that this client is overloaded
    queueing: Queueing
    by_source: dict[str, SourceFigures]  # empty if all requests have the same

    @property
    def all_answered(self) -> bool:
        """Whether every planned request was answered to the end."""
        return self.outcomes.get(Outcome.OK, 0) == self.planned


def figures(
    runs: Sequence[Run], observed: Histogram | None, unloaded: Unloaded, limits: Limits | None = None
) -> Figures:
    """Sum up `runs`; `observed` is the server's histogram of queueing delays during them, if it has one."""
    records = [record for run in runs for record in run.records]
    answered = [record for record in records if record.ok]
    planned, duration_s = sum(run.planned for run in runs), sum(run.duration_s for run in runs)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in answered)
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    output_tokens = sum(record.output_tokens for record in answered)
    sources: Counter[str | None] = sum((Counter(run.sources) for run in runs), Counter())

    def per_s(amount: int) -> float:
        return amount / duration_s if duration_s else 0.0

    return Figures(
        planned=planned,
        outcomes=dict(Counter(record.outcome.value for record in records)),
        reasons=dict(
            Counter(
                f"{attempt.outcome}: {attempt.reason}"
                for record in records
                for attempt in record.attempts
                if attempt.outcome is not Outcome.OK
            )
        ),
        not_sent=planned - len(records),
        retries=sum(max(0, record.sendings - 1) for record in records),
        short_answers=sum(record.short for record in answered),
        counted=dict(Counter(record.counted.value for record in answered)),
        duration_s=duration_s,
        requests_per_s=per_s(len(answered)),
        goodput_per_s=None if limits is None else per_s(sum(limits.kept_by(record) for record in answered)),
        output_tokens_per_s=per_s(output_tokens),
        total_tokens_per_s=per_s(prompt_tokens + output_tokens),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        most_tokens_together=max((arrival.tokens for record in answered for arrival in record.arrivals), default=0),
        ttft_s=Distribution.of(record.ttft_s for record in answered),
        tbt_s=Distribution.of(pooled_gaps_s(answered)),
        request_median_tbt_s=Distribution.of(_of_gaps(record, 50) for record in answered),
        request_p99_tbt_s=Distribution.of(_of_gaps(record, 99) for record in answered),
        tpot_s=Distribution.of(record.tpot_s for record in answered),
        e2e_s=Distribution.of(record.e2e_s for record in answered),
        lag_s=Distribution.of(record.lag_s for record in records),
        queueing=queueing(records, observed, unloaded),
        by_source=by_source(sources, records),
    )


def pooled_gaps_s(records: Iterable[Record]) -> list[float]:
    """Return the times between tokens of all answered requests."""
    return [gap for record in records if record.ok for gap in record.gaps_s]


def _of_gaps(record: Record, percent: float) -> float | None:
    gaps = record.gaps_s
    return percentile(gaps, percent) if gaps else None
