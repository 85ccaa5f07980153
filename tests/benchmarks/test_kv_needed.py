"""What PSA's figure shows, on rows made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import kv_needed
from benchmarks.accuracy.kv_needed import least, points, table
from benchmarks.accuracy.selections import GROUPS, PSA_FAMILIES, SELECTIONS
from tests.benchmarks.test_summaries import row

TOPK, PSA = PSA_FAMILIES[0], PSA_FAMILIES[1]


def summaries() -> list[dict[str, Any]]:
    scores = {
        "full": (0.8, 1.0), "cuboid-2%": (0.6, 0.1), "cuboid-10%": (0.8, 0.3), "cuboid-20%": (0.79, 0.4),
        "psa-0.80": (0.7, 0.12), "psa-0.95": (0.79, 0.15), "codes2-5%": (0.4, 0.2),
    }  # fmt: skip
    return [
        {"measure": "RULER-like", "tokens": 1024, "selection": name, "score": score, "bytes_read": read}
        | {"pages_read": read / 2}
        for name, (score, read) in scores.items()
    ]


def test_the_setting_that_reads_least_of_those_that_reach_the_accuracy() -> None:
    found = points(summaries(), TOPK, "score")
    assert [(point.selection, point.bytes_read) for point in found] == [
        ("cuboid-2%", 0.1), ("cuboid-10%", 0.3), ("cuboid-20%", 0.4),
    ]  # fmt: skip
    assert abs(found[0].accuracy - 0.75) < 1e-12
    assert least(found, 0.98) == found[1]
    assert least(found, 0.99) == found[1]
    assert least(found, 0.7) == found[0]
    assert least(points(summaries(), PSA_FAMILIES[2], "score"), 0.98) is None


def test_perplexity_is_more_accurate_where_it_is_lower() -> None:
    rows = [
        {"selection": name, "perplexity": perplexity, "bytes_read": 0.5, "pages_read": 0.4}
        for name, perplexity in (("full", 10.0), ("cuboid-5%", 12.5))
    ]
    assert [point.accuracy for point in points(rows, TOPK, "perplexity")] == [0.8]


def test_the_table_says_how_much_less_than_top_k_and_where_the_accuracy_is_not_reached() -> None:
    topk, psa, codes = table(summaries(), 0.98).splitlines()[2:]
    assert "cuboid-10%" in topk
    assert topk.endswith("| 1.00         |")
    assert "psa-0.95" in psa
    assert psa.endswith("| 2.00         |")
    assert "none of 1" in codes
    assert "at most 50.0%" in codes


def test_accuracy_without_full_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="selection=full: must be among the rows"):
        table(summaries()[1:], 0.98)
    none = [row | {"score": 0} for row in summaries()]
    with pytest.raises(ValueError, match="score=0: full attention has no accuracy"):
        table(none, 0.98)


def test_all_settings_of_the_families_can_be_run_by_one_name() -> None:
    settings = [name for family in PSA_FAMILIES for name in family.selections]
    assert set(settings) < set(SELECTIONS)
    assert GROUPS["psa"] == ["full", *settings]
    for family in PSA_FAMILIES:
        assert {SELECTIONS[name].get("summary", "key_codes") for name in family.selections} == {family.summary}


def test_one_command_draws_both_figures_from_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deciles = [[], [place / 100 for place in range(11)]]  # the first layer has a window
    rows = [
        row("perplexity", "full", loss=2.0, bytes_read=1.0, pages_read=1.0, oracle_deciles=deciles),
        row("perplexity", "psa-0.80", loss=2.1, bytes_read=0.2, pages_read=0.1),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    drawn = kv_needed.main([str(file), "--out", str(tmp_path / "plots")])
    assert [path.name for path in drawn] == ["kv-needed-perplexity-1024.png", "oracle-needs-perplexity-1024.png"]
    assert all(path.stat().st_size > 0 for path in drawn)
    assert "at most 90.5%" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        kv_needed.main([str(file), "--out", str(tmp_path), "--accuracy", "0"])
