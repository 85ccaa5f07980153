"""What the capacity benchmark makes of its reports."""

from typing import Any

import pytest

from benchmarks.serving.capacity import compare, show


def found(strict: float | None, relaxed: float | None) -> dict[str, Any]:
    limits = {
        name: {"holds_per_s": holds, "fails_per_s": 1.0, "of_reference": 1.0, "too_short": name == "relaxed"}
        for name, holds in (("strict", strict), ("relaxed", relaxed))
    }
    return {"capacity": {"servers": [{"capacity": limits}]}}


def prefill(*requests_per_s: float) -> dict[str, Any]:
    return {"servers": [{"figures": {"requests_per_s": rate, "ttft_s": {"p50": 1.5}}} for rate in requests_per_s]}


REPORTS = {"stock": found(0.2, 0.4), "topk-5": found(0.5, None)}
ROWS = {row["server"]: row for row in compare(REPORTS, {"topk-5": prefill(0.5, 0.6)})}


def test_ratios_are_to_stock_under_the_same_limit() -> None:
    """A report of one server alone has itself as its reference."""
    assert ROWS["stock"]["strict"]["of_reference"] == ROWS["stock"]["relaxed"]["of_reference"] == 1.0
    assert ROWS["topk-5"]["strict"]["of_reference"] == pytest.approx(2.5)
    assert ROWS["topk-5"]["relaxed"]["of_reference"] is None  # it held at no rate
    assert ROWS["topk-5"]["prefill"]["of_reference"] == pytest.approx(1.2)


def test_a_server_without_its_second_trace_has_no_figures_of_it() -> None:
    for prefills in ({}, {"topk-5": prefill(0.6)}):  # the latter made before servers were asked in turns
        assert not any("prefill" in row for row in compare(REPORTS, prefills))


def test_the_table_says_what_was_too_short_to_show() -> None:
    line = next(line for line in show(list(ROWS.values())).splitlines() if "topk-5" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["topk-5", "0.500 to 1.000", "2.50", "0.000 to 1.000, too short", "", "0.600 (0.500)", "1.20"]
