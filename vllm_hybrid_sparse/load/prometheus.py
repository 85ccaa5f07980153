"""Histograms and sums read from the text that a server exposes to Prometheus."""

import bisect
import math
import re
from dataclasses import dataclass

QUEUE_TIME = "vllm:request_queue_time_seconds"  # from a request's arrival in the scheduler until it is first scheduled

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)_bucket\{(?P<labels>.*)\}\s+(?P<value>\S+)")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of observations at or below ascending bounds, the last of which is infinite; all label sets together."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]  # cumulative

    @property
    def total(self) -> float:
        """The number of observations."""
        return self.counts[-1]

    def since(self, before: "Histogram") -> "Histogram":
        """Return what was observed after `before` was read; ValueError if the buckets differ or counts fell."""
        counts = tuple(later - earlier for later, earlier in zip(self.counts, before.counts, strict=True))
        if self.bounds != before.bounds or min(counts) < 0:
            raise ValueError("the histograms are not of one series")
        return Histogram(self.bounds, counts)

    def plus(self, other: "Histogram") -> "Histogram":
        """Return both together; ValueError if the buckets differ."""
        if self.bounds != other.bounds:
            raise ValueError("the histograms have different buckets")
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def bucket(self, share: float) -> tuple[float, float] | None:
        """Return the bounds of the bucket in which a quantile lies; None without observations.

        The quantile is above the first bound (0 for the lowest bucket) and at most the second.

        share   of the observations at or below the quantile, above 0 and at most 1
        """
        if not self.total:
            return None
        place = bisect.bisect_left(self.counts, share * self.total)
        return self.bounds[place - 1] if place else 0.0, self.bounds[place]


def total(text: str, name: str) -> float | None:
    """Return the sum of a counter or gauge over its label sets; None if the exposition has none of that name."""
    values = [
        float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    ]
    return sum(values) if values else None


def histogram(text: str, name: str) -> Histogram | None:
    """Return the histogram `name` of an exposition, its label sets added up; None if it has none."""
    counts: dict[float, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample["name"] != name:
            continue
        bound = _BOUND.search(sample["labels"])
        if bound is not None:
            at = float(bound[1])
            counts[at] = counts.get(at, 0.0) + float(sample["value"])
    if not counts or not math.isinf(max(counts)):
        return None
    bounds = tuple(sorted(counts))
    return Histogram(bounds, tuple(counts[bound] for bound in bounds))
