"""Rows are kept, found again, and never mixed with those of other code."""

from pathlib import Path

import pytest

from benchmarks.accuracy.rows import OtherCommitError, RowFile, read_rows


def test_a_row_is_found_by_what_identifies_it_and_by_nothing_less(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, "abc").add({"task": "vt", "sample": 1}, {"score": 0.5})
    rows = RowFile(path, "abc")
    assert rows.get({"sample": 1, "task": "vt"}) == {
        "commit": "abc", "identity": {"task": "vt", "sample": 1}, "score": 0.5,
    }  # fmt: skip
    assert rows.get({"task": "vt", "sample": 2}) is None
    assert rows.get({"task": "vt", "sample": 1, "seed": 0}) is None


def test_rows_of_another_commit_are_refused_and_dropped_only_when_told_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, "abc").add({"sample": 1}, {"score": 0.5})
    with pytest.raises(OtherCommitError, match=r"rows\.jsonl: holds rows of commit abc, this is def"):
        RowFile(path, "def")
    assert len(read_rows(path)) == 1
    rows = RowFile(path, "def", redo=True)
    assert rows.get({"sample": 1}) is None
    assert read_rows(path) == []
    rows.add({"sample": 1}, {"score": 1.0})
    assert [row["commit"] for row in read_rows(path)] == ["def"]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path, "abc")
    rows.add({"sample": 1}, {"score": 0.5})
    rows.add({"sample": 2}, {"score": 0.5})
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    again = RowFile(path, "abc")
    assert again.get({"sample": 1}) is not None
    assert again.get({"sample": 2}) is None
    again.add({"sample": 2}, {"score": 0.25})
    assert [row["score"] for row in read_rows(path)] == [0.5, 0.25]


def test_a_broken_file_is_not_taken_for_a_cut_off_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"commit": "abc"\n{"commit": "abc", "identity": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1"):
        RowFile(path, "abc")


def test_without_a_path_rows_are_kept_in_memory() -> None:
    rows = RowFile(None, "abc")
    rows.add({"sample": 1}, {"score": 0.5})
    assert rows.get({"sample": 1}) == {"commit": "abc", "identity": {"sample": 1}, "score": 0.5}
