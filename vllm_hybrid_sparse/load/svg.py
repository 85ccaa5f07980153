"""Charts as inline SVG: lines, steps and points over two axes, coloured by the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Literal

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 28, 46
_TICKS = 6
_COLOURS = 6  # as many as the style sheet has
_MOST_POINTS = 400  # of a line; a page with hundreds of thousands of points does not scroll
_MARKED_POINTS = 20  # a line with at most this many shows each of them

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points under one name; for a line or steps they are ascending in x."""

    name: str
    points: Sequence[Point]
    kind: Literal["line", "steps", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn; `levels` are dashed horizontal lines with their names."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    levels: Sequence[tuple[str, float]] = ()
    log_x: bool = False
    log_y: bool = False
    y_top: float | None = None  # where the axis ends; None: as the points need


@dataclass(slots=True)
class _Axis:
    """A range of values mapped to pixels; the range is widened to whole ticks."""

    values: list[float]
    begin: float
    end: float
    log: bool
    top: float | None = None
    ticks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.log:
            self.values = [value for value in self.values if value > 0] or [1.0]
            low, high = math.floor(math.log10(min(self.values))), math.ceil(math.log10(max(self.values)))
            self.ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
        else:
            reach = (self.top if self.top is not None else max([*self.values, 0.0])) or 1.0
            step = _step(reach)
            self.ticks = [step * number for number in range(math.ceil(reach / step - 1e-9) + 1)]

    def place(self, value: float) -> float:
        """Return the pixel of a value; a value outside the axis is put at its end."""
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        share = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return round(self.begin + (self.end - self.begin) * share, 1)


def _step(high: float) -> float:
    """Return a tick distance: 1, 2 or 5 times a power of ten, so that about `_TICKS` of them make `high`."""
    power = 10.0 ** math.floor(math.log10(high / _TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * _TICKS >= high * (1 - 1e-9))


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Return at most `most` of the points at even distances, including the first and the last; `most` >= 2."""
    if len(points) <= most:
        return list(points)
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def cumulative(values: Sequence[float], of: int | None = None) -> list[Point]:
    """Return for each value the share of values at or below it; empty without any.

    of   what the shares are of, at least as many as there are values; None: of the values
    """
    return [(value, number / (of or len(values))) for number, value in enumerate(sorted(values), start=1)]


def draw(chart: Chart) -> str:
    """Return an <svg> element; if there is nothing to draw, it says so."""
    points = [point for series in chart.series for point in series.points]
    label = f'role="img" aria-label="{escape(chart.title)}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    title = f'<text class="title" x="{_LEFT}" y="16">{escape(chart.title)}</text>'
    if not points:
        middle = f'x="{_WIDTH // 2}" y="{_HEIGHT // 2}" text-anchor="middle"'
        return f"<svg {label}>{title}<text {middle}>nothing was measured</text></svg>"
    levels = [value for _, value in chart.levels]
    x_axis = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, chart.log_x)
    y_axis = _Axis([*(y for _, y in points), *levels], _HEIGHT - _BOTTOM, _TOP, chart.log_y, chart.y_top)
    parts = [title, *_grid(x_axis, y_axis), *_labels(chart)]
    parts += [_drawn(series, number, x_axis, y_axis) for number, series in enumerate(chart.series)]
    for name, value in chart.levels:
        y = y_axis.place(value)
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT + 4}" y="{y - 3}">{escape(name)}</text>')
    return f"<svg {label}>{''.join(parts)}</svg>{_legend(chart.series)}"


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.6g}</text>')
    for value in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{value:.6g}</text>')
    return parts


def _labels(chart: Chart) -> list[str]:
    middle = (_LEFT + _WIDTH - _RIGHT) // 2
    height = (_TOP + _HEIGHT - _BOTTOM) // 2
    return [
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(14 {height}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>',
    ]


def _drawn(series: Series, number: int, x_axis: _Axis, y_axis: _Axis) -> str:
    colour = f"c{number % _COLOURS}"
    few = len(series.points) <= (_MARKED_POINTS if series.kind == "line" else 1)  # a single step has no length
    marked = series.kind == "points" or few
    dots = "".join(
        f'<circle class="{colour} dot" cx="{x_axis.place(x)}" cy="{y_axis.place(y)}" r="3">'
        f"<title>{escape(series.name)}: {x:.4g}, {y:.4g}</title></circle>"
        for x, y in (series.points if marked else ())
    )
    if series.kind == "points":
        return dots
    placed = [(x_axis.place(x), y_axis.place(y)) for x, y in thinned(series.points)]
    if series.kind == "steps":
        placed = [*placed[:1], *(corner for (_, y), (x, to) in pairwise(placed) for corner in ((x, y), (x, to)))]
    way = " ".join(f"{x:g},{y:g}" for x, y in placed)
    return f'<polyline class="{colour} line" points="{way}"/>{dots}'


def _legend(series: Sequence[Series]) -> str:
    items = (
        f'<li><span class="key c{number % _COLOURS}"></span>{escape(one.name)}</li>'
        for number, one in enumerate(series)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
