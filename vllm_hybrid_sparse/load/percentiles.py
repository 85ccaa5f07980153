"""Percentiles as numpy computes them, without numpy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated linearly between the sorted values; ValueError if there are none."""
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
    """A summary of many values; without values all fields but `count` are None."""

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
