"""What a measurement writes is JSON, whatever it measured."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import save, spread


def test_a_spread_of_nothing_is_written_as_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [{"time_ms": spread([]), "pair": (1.5, math.inf)}, {"time_ms": spread([2.0])}]
    path = save("measured", {"rows": rows, "held": True, "count": 3})
    found = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    nothing = {"p20": None, "p50": None, "p80": None, "values": 0}
    assert found["rows"] == [{"time_ms": nothing, "pair": [1.5, None]}, {"time_ms": spread([2.0])}]
    assert (found["held"], found["count"]) == (True, 3)
    assert "commit" in found


def test_a_measurement_rewrites_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    path = save("measured", {"rows": [1]})
    assert save("measured", {"rows": [1, 2]}, path) == path
    assert [*tmp_path.iterdir()] == [path]
    assert json.loads(path.read_text(encoding="utf-8"))["rows"] == [1, 2]
