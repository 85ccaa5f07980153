"""What the capacity benchmark computes from its reports, and which reports it accepts as its own."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import capacity
from benchmarks.serving.capacity import compare, iteration_ms, kept_report, measure, measured_with, show
from benchmarks.serving.capacity_reports import OtherOptionsError, bench


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
    """In a report on a single server, that server is its own reference."""
    assert ROWS["stock"]["strict"]["of_reference"] == ROWS["stock"]["relaxed"]["of_reference"] == 1.0
    assert ROWS["topk-5"]["strict"]["of_reference"] == pytest.approx(2.5)
    assert ROWS["topk-5"]["relaxed"]["of_reference"] is None  # it held at no rate
    assert ROWS["topk-5"]["prefill"]["of_reference"] == pytest.approx(1.2)


def test_a_server_without_its_second_trace_has_no_figures_of_it() -> None:
    for prefills in ({}, {"topk-5": prefill(0.6)}):  # the second is from before servers took turns
        assert not any("prefill" in row for row in compare(REPORTS, prefills))


def test_the_table_says_what_was_too_short_to_show() -> None:
    line = next(line for line in show(list(ROWS.values())).splitlines() if "topk-5" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["topk-5", "0.500 to 1.000", "2.50", "0.000 to 1.000, too short", "", "0.600 (0.500)", "1.20"]


def options_of(out: Path, **changes: Any) -> argparse.Namespace:
    given = {
        "out": out, "model": Path("models/tiny"), "dtype": "bfloat16", "at_once": 8, "documents": 5, "threads": "all",
        "document_tokens": 7296, "try_seconds": 130.0, "step": 1.4, "tolerance": 0.25, "tries": 2, "rate_factor": 1.0,
        "digests": {"questions": "ab", "prefill": "cd"},
    }  # fmt: skip
    return argparse.Namespace(**given | changes)


def keep(name: str, options: argparse.Namespace, iteration_s: float = 0.03, **more: Any) -> None:
    """Write the report that a run with these options makes."""
    content = found(0.2, 0.4) | {"servers": [{"unloaded": {"iteration_s": iteration_s}}]}
    content |= {"measured_with": measured_with(name, options)} | more
    (options.out / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "stock.json: was measured with dtype=bfloat16, not float32"),
        ({"at_once": 16}, "stock.json: was measured with at_once=8, not 16"),
        ({"documents": 4}, "stock.json: was measured with documents=5, not 4"),
        ({"try_seconds": 200.0}, "stock.json: was measured with try_seconds=130.0, not 200.0"),
        ({"model": Path("models/other")}, "stock.json: was measured with model=tiny, not other"),
        ({"digests": {"questions": "ef"}, "threads": "0"}, "threads=all, not 0; trace_sha256=ab, not ef: name another"),
    ],
)
def test_a_report_that_was_measured_with_other_options_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    keep("stock", options_of(tmp_path))
    with pytest.raises(OtherOptionsError) as refused:
        kept_report("stock", options_of(tmp_path, **changes))
    assert said in str(refused.value)


def test_an_interrupted_run_goes_on_with_the_reports_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "make_server", lambda *_: pytest.fail("measured again"))
    options = options_of(tmp_path)
    assert kept_report("stock", options) is None
    for name in ("stock", "topk-5", "topk-5-prefill"):
        keep(name, options)
        assert kept_report(name, options) is not None
    measure(
        "topk-5", options_of(tmp_path, step=1.2, tries=3, tolerance=0.1, rate_factor=2.0)
    )  # these options only change the search
    assert iteration_ms(options) == pytest.approx(30.0)


def test_a_report_under_the_limits_of_another_stock_is_refused(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    keep("stock", options)
    keep("topk-5", options)
    keep("stock", options, iteration_s=0.05)
    with pytest.raises(OtherOptionsError, match=r"topk-5\.json: was measured with iteration_ms=30.0, not 50.0"):
        kept_report("topk-5", options)


def test_a_report_of_arrivals_that_were_not_rescaled_is_refused(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    older = measured_with("stock", options)
    del older["arrivals"]
    keep("stock", options, measured_with=older)
    with pytest.raises(OtherOptionsError, match=r"stock\.json: was measured .*arrivals"):
        kept_report("stock", options)


def test_a_report_that_says_nothing_of_its_options_is_refused(tmp_path: Path) -> None:
    keep("stock", options_of(tmp_path), measured_with=None)
    with pytest.raises(OtherOptionsError, match=r"stock\.json: does not say what it was measured with"):
        kept_report("stock", options_of(tmp_path))


def test_a_report_appears_when_it_is_whole_and_says_what_it_was_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(command: list[str], **_how: Any) -> subprocess.CompletedProcess[str]:
        part = Path(command[command.index("--out") + 1])
        assert not (tmp_path / "stock.json").exists()
        for suffix, text in ((".json", '{"schema": 2}'), (".html", "page")):
            part.with_name(part.name + suffix).write_text(text)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", load)
    bench("stock=http://host", tmp_path / "stock", {"dtype": "float32"}, "--tries", "2")
    assert json.loads((tmp_path / "stock.json").read_text()) == {"schema": 2, "measured_with": {"dtype": "float32"}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stock.html", "stock.json"]
