"""Charts as inline SVG."""

import re
import xml.etree.ElementTree as ET

import pytest

from vllm_hybrid_sparse.load.svg import Chart, Series, cumulative, draw, thinned


def element(chart: Chart) -> ET.Element:
    return ET.fromstring(draw(chart).partition('<ul class="legend">')[0])


def numbers(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", text)]


@pytest.mark.parametrize("log", [False, True])
def test_lines_lie_inside_the_picture_and_keep_their_order(log: bool) -> None:
    points = [(0.5, 1.0), (2.0, 30.0), (40.0, 900.0)]
    chart = Chart("t", "x", "y", [Series("a", points)], log_x=log, log_y=log)
    placed = numbers(element(chart).find("polyline").attrib["points"])
    assert len(placed) == 3
    assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in placed)
    assert placed == sorted(placed)
    assert [y for _, y in placed] == sorted((y for _, y in placed), reverse=True)  # in SVG, y decreases upwards


def test_steps_go_along_before_they_go_up() -> None:
    chart = Chart("t", "x", "y", [Series("a", [(1.0, 0.5), (2.0, 1.0)], "steps")])
    (_, start), (corner, along), (end, _) = numbers(element(chart).find("polyline").attrib["points"])
    assert corner == end
    assert along == start


def test_points_say_what_they_are() -> None:
    chart = Chart("t", "x", "y", [Series("a<b", [(1.0, 2.0), (3.0, 4.0)], "points")])
    assert [dot.findtext("title") for dot in element(chart).iter("circle")] == ["a<b: 1, 2", "a<b: 3, 4"]


def test_levels_are_drawn_inside_even_above_all_points() -> None:
    chart = Chart("t", "x", "y", [Series("a", [(1.0, 1.0)])], levels=[("limit", 500.0)])
    (level,) = (line for line in element(chart).iter("line") if line.attrib["class"] == "level")
    assert 0 < float(level.attrib["y1"]) < 300


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(0.0, 0.0), (1.0, 0.0)], [(1e-9, 1e9)], [(3.0, 3.0)] * 2])
@pytest.mark.parametrize("log", [False, True])
def test_odd_values_are_drawn(points: list[tuple[float, float]], log: bool) -> None:
    assert element(Chart("t", "x", "y", [Series("a", points)], log_x=log, log_y=log)).find("polyline") is not None


def test_nothing_measured_is_said() -> None:
    assert "nothing was measured" in draw(Chart("t", "x", "y", [Series("a", [])]))


def test_cumulative_ends_at_one_in_ascending_order() -> None:
    assert cumulative([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]
    assert cumulative([]) == []
    assert cumulative([2.0, 1.0], of=4) == [(1.0, 0.25), (2.0, 0.5)]
    assert cumulative([], of=4) == []


def test_a_single_step_is_seen() -> None:
    alone, two = (Chart("t", "x", "y", [Series("a", points, "steps")]) for points in ([(1, 1)], [(1, 0.5), (2, 1)]))
    assert [dot.findtext("title") for dot in element(alone).iter("circle")] == ["a: 1, 1"]
    assert not list(element(two).iter("circle"))


@pytest.mark.parametrize("count", [1, 400, 401, 10_000])
def test_thinned_keeps_both_ends(count: int) -> None:
    points = [(float(number), 0.0) for number in range(count)]
    kept = thinned(points)
    assert len(kept) == min(count, 400)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)
