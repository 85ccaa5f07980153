"""How long requests waited until a server first worked on them (PSA, section 5: "scheduling delay").

Only the server knows it. vLLM exposes it as the histogram `vllm:request_queue_time_seconds`, which is used if there is
one. Otherwise the client estimates it: the time to first token less that of a prompt served alone of which as many
tokens are computed, not taken from the prefix cache. The estimate includes how much other requests slow a prefill down,
so it is at or above the true delay.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_hybrid_sparse.load.exchange import Record
from vllm_hybrid_sparse.load.percentiles import percentile
from vllm_hybrid_sparse.load.prometheus import QUEUE_TIME, Histogram


def computed_tokens(record: Record) -> int | None:
    """Return a prompt's tokens less those known to be cached; None if the server does not count its tokens."""
    return None if record.prompt_tokens is None else max(0, record.prompt_tokens - (record.cached_tokens or 0))


@dataclass(frozen=True, slots=True)
class Unloaded:
    """How long requests that are served alone take, measured before a run."""

    ttft_s: tuple[tuple[int, float], ...]  # (computed tokens of a prompt, time), ascending, one of each; may be empty
    gap_s: float | None  # median time between arrivals: a decode iteration; None if no answer had two

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Unloaded":
        """Sum up requests that were sent one after another."""
        answered = [record for record in records if record.ok]
        by_length: dict[int, list[float]] = {}
        for record in answered:
            computed = computed_tokens(record)
            if computed is not None and record.ttft_s is not None:
                by_length.setdefault(computed, []).append(record.ttft_s)
        gaps = [gap for record in answered for gap in record.gaps_s]
        return cls(
            ttft_s=tuple((tokens, statistics.median(times)) for tokens, times in sorted(by_length.items())),
            gap_s=statistics.median(gaps) if gaps else None,
        )

    def expected_ttft_s(self, computed_tokens: int | None) -> float | None:
        """Return the time to first token of a prompt served alone, interpolated linearly between measured ones.

        Outside them it is the nearest one's. None if nothing was measured, or if the number of tokens that the server
        computes is not known and more than one was measured.
        """
        lengths = [tokens for tokens, _ in self.ttft_s]
        if not lengths or (computed_tokens is None and len(lengths) > 1):
            return None
        tokens = lengths[0] if computed_tokens is None else computed_tokens
        place = bisect.bisect_left(lengths, tokens)
        if place == 0 or place == len(lengths):
            return self.ttft_s[min(place, len(lengths) - 1)][1]
        (low, low_s), (high, high_s) = self.ttft_s[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Queueing:
    """Queueing delay of the requests of a run, and its source.

    A histogram tells only in which bucket a percentile lies: above `above_s` and at most `p50_s`, and so on. The last
    bucket has no upper bound; for it both values are the lower bound.
    """

    source: str
    requests: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    above_s: tuple[float, ...] | None = None  # lower bounds of the three; None: the three are exact

    def median(self) -> str:
        """Return the median in seconds, or its bounds."""
        if self.p50_s is None:
            return "?"
        return f"{self.p50_s:.2f}" if self.above_s is None else bounds_text(self.above_s[0], self.p50_s)

    def median_above(self, limit_s: float) -> bool | None:
        """Return whether the median is above `limit_s`; None if that is not known."""
        if self.p50_s is None:
            return None
        if self.above_s is None:
            return self.p50_s > limit_s
        if self.above_s[0] >= limit_s:
            return True
        return False if self.above_s[0] < self.p50_s <= limit_s else None

    def shows_within(self, limit_s: float) -> bool:
        """Return whether a shorter delay might be shown to be at most `limit_s`.

        False if none is known, or if the median lies in the first bucket and that does not end by then. If the first
        bucket was not seen, it might.
        """
        if self.p50_s is None:
            return False
        return self.above_s is None or self.above_s[0] > 0 or 0 < self.p50_s <= limit_s


def bounds_text(above: float, at_most: float) -> str:
    """Return a short text: the value is above one number and at most the other; if they are equal, only above it."""
    if at_most == above:
        return f">{above:g}"
    return f"{above:g}–{at_most:g}" if above else f"≤{at_most:g}"


FROM_SERVER = f"server: {QUEUE_TIME}"
ESTIMATED = "estimate: time to first token less that of a prompt with as many uncached tokens served alone"
UNKNOWN = "not known"


def estimated_s(record: Record, unloaded: Unloaded) -> float | None:
    """Return a request's delay as its client estimates it, at least 0; None without a token or a time to compare."""
    expected_s = unloaded.expected_ttft_s(computed_tokens(record))
    if record.ttft_s is None or expected_s is None:
        return None
    return max(0.0, record.ttft_s - expected_s)


def _within_buckets(observed: Histogram) -> Queueing:
    buckets = [bucket for share in (0.5, 0.9, 0.99) if (bucket := observed.bucket(share)) is not None]
    p50_s, p90_s, p99_s = (low if math.isinf(high) else high for low, high in buckets)
    above_s = tuple(low for low, _ in buckets)
    return Queueing(FROM_SERVER, round(observed.total), p50_s, p90_s, p99_s, above_s)


def queueing(records: Sequence[Record], observed: Histogram | None, unloaded: Unloaded) -> Queueing:
    """Return the delay from the server's histogram if it observed anything, else as the client estimates it."""
    if observed is not None and observed.total:
        return _within_buckets(observed)
    delays = [delay for record in records if record.ok and (delay := estimated_s(record, unloaded)) is not None]
    if not delays:
        return Queueing(UNKNOWN, 0, None, None, None)
    p50_s, p90_s, p99_s = (percentile(delays, share) for share in (50, 90, 99))
    return Queueing(ESTIMATED, len(delays), p50_s, p90_s, p99_s)
