"""What plots are drawn from."""

import json
from pathlib import Path

import pytest

from benchmarks.accuracy.plots import curve, load


def result(path: Path, rows: dict[str, float], tokens: int = 4096) -> Path:
    """A result of `perplexity`, as far as plots read it."""
    content = {
        "size": f"{tokens}-256",
        "rows": {name: {"perplexity": value, "bytes_read": 0.5} for name, value in rows.items()},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_of_results_with_the_same_selection_the_last_one_counts(tmp_path: Path) -> None:
    files = [
        result(tmp_path / "before.json", {"full": 10.0, "fluxion": 10.5}),
        result(tmp_path / "longer.json", {"fluxion": 9.0}, tokens=8192),
        result(tmp_path / "after.json", {"fluxion": 10.1}),
    ]
    loaded = [(row["selection"], row["tokens"], row["perplexity"]) for row in load(files)]
    assert loaded == [("full", 4096, 10.0), ("fluxion", 8192, 9.0), ("fluxion", 4096, 10.1)]


def test_perplexity_is_shown_against_full_attention_s_of_the_same_run(tmp_path: Path) -> None:
    files = [
        result(tmp_path / "before.json", {"full": 10.0, "topk": 11.0}),
        result(tmp_path / "alone.json", {"quest": 12.0}),
        result(tmp_path / "after.json", {"full": 20.0, "fluxion": 21.0}),
    ]
    shown = {name: ratio for name, _, ratio, _ in curve(load(files), "perplexity")}
    assert shown == pytest.approx({"topk": 1.1, "quest": 0.6, "full": 1.0, "fluxion": 1.05})
