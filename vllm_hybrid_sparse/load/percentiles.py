"""Percentiles, as numpy takes them, without numpy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, by straight lines between the sorted values; ValueError without any."""
    if not values:
        raise ValueError("percentile: needs at least one value")
    return _of_sorted(sorted(values), percent)


def _of_sorted(ordered: Sequence[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is told of many values; all but `count` are None without any."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        """Sum up `values`, leaving out those that are None."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return cls(0)
        p50, p90, p99 = (_of_sorted(ordered, percent) for percent in (50, 90, 99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
