"""How long requests waited until a server first worked on them (PSA, section 5: "scheduling delay").

Only a server knows it. vLLM exposes it as the histogram `vllm:request_queue_time_seconds`, which is used where there is
one. From the client's side it is estimated as the time to first token less that of a prompt of the same length served
alone; this also counts what running beside other requests does to a prefill, so it is at or above the true delay.
"""

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_hybrid_sparse.load.exchange import Record
from vllm_hybrid_sparse.load.percentiles import percentile
from vllm_hybrid_sparse.load.prometheus import QUEUE_TIME, Histogram


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What requests take that are served alone, measured before a run."""

    ttft_s: tuple[tuple[int, float], ...]  # by prompt tokens, ascending, one entry a length; may be empty
    gap_s: float | None  # median time between arrivals: a decode iteration; None where no answer had two

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Unloaded":
        """Sum up requests that were sent one after another."""
        answered = [record for record in records if record.ok]
        by_length: dict[int, list[float]] = {}
        for record in answered:
            if record.prompt_tokens is not None and record.ttft_s is not None:
                by_length.setdefault(record.prompt_tokens, []).append(record.ttft_s)
        gaps = [gap for record in answered for gap in record.gaps_s]
        return cls(
            ttft_s=tuple((tokens, statistics.median(times)) for tokens, times in sorted(by_length.items())),
            gap_s=statistics.median(gaps) if gaps else None,
        )

    def expected_ttft_s(self, prompt_tokens: int | None) -> float | None:
        """Return the time to first token of a prompt served alone, between the measured lengths by straight lines.

        Beyond them it is that of the nearest length. None where nothing was measured, or the length is not known and
        there is more than one.
        """
        if not self.ttft_s or (prompt_tokens is None and len(self.ttft_s) > 1):
            return None
        lengths = [tokens for tokens, _ in self.ttft_s]
        place = bisect.bisect_left(lengths, prompt_tokens or lengths[0])
        if place == 0 or place == len(lengths):
            return self.ttft_s[min(place, len(lengths) - 1)][1]
        (low, low_s), (high, high_s) = self.ttft_s[place - 1 : place + 1]
        return low_s + (high_s - low_s) * ((prompt_tokens or low) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Queueing:
    """Queueing delay of the requests of a run, and where it is known from."""

    source: str
    requests: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


FROM_SERVER = f"server: {QUEUE_TIME}"
ESTIMATED = "estimate: time to first token less that of a prompt of this length served alone"
UNKNOWN = "not known"


def estimated_s(record: Record, unloaded: Unloaded) -> float | None:
    """Return a request's delay as its client can tell, at least 0; None where no token came or nothing compares."""
    expected_s = unloaded.expected_ttft_s(record.prompt_tokens)
    if record.ttft_s is None or expected_s is None:
        return None
    return max(0.0, record.ttft_s - expected_s)


def queueing(records: Sequence[Record], observed: Histogram | None, unloaded: Unloaded) -> Queueing:
    """Return the delay from the server's histogram where it observed anything, else as the client estimates it."""
    if observed is not None and observed.total:
        return Queueing(FROM_SERVER, round(observed.total), *(observed.quantile(share) for share in (0.5, 0.9, 0.99)))
    delays = [delay for record in records if record.ok and (delay := estimated_s(record, unloaded)) is not None]
    if not delays:
        return Queueing(UNKNOWN, 0, None, None, None)
    return Queueing(ESTIMATED, len(delays), *(percentile(delays, share) for share in (50, 90, 99)))
