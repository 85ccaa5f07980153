"""The runner from end to end on a random model: what it asks, keeps, resumes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import answers, plots, tasks
from benchmarks.accuracy.reference_attention import PageRule
from benchmarks.accuracy.rows import read_rows
from benchmarks.accuracy.selections import REFERENCES, SELECTIONS
from tests.benchmarks.tiny import byte_tokenizer, tiny_model


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder. No results are saved, and the commit is `abc`."""
    path = tmp_path / "tiny"
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    monkeypatch.setattr(tasks, "save", lambda *_: None)
    monkeypatch.setattr(tasks, "commit", lambda: "abc")
    monkeypatch.setitem(SELECTIONS, "everything", {"policy": "progressive", "threshold": 1})
    monkeypatch.setitem(REFERENCES, "oracle-everything", PageRule(order="oracle", ratio=1.0))
    return path


def arguments(model_path: Path, *more: str) -> list[str]:
    return ["--model", str(model_path), "--format", "plain", "--samples", "1", "--lengths", "2500", *more]


def by_selection(rows: list[Any]) -> dict[str, Any]:
    return {row["identity"]["selection"]: row for row in rows}


def test_rows_compare_selections_with_full_attention(model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    names = "quest-2%,everything,oracle-everything,random-5%"
    rows = tasks.main(arguments(model_path, "--tasks", "niah_multivalue", "--selections", names, "--out", str(out)))
    assert rows == read_rows(out)
    assert [row["identity"]["selection"] for row in rows] == ["full", *names.split(",")]
    found = by_selection(rows)
    for name in ("full", "everything", "oracle-everything"):
        assert found[name]["top1_agreement"] == 1
        assert found[name]["answer_ids"] == found["full"]["answer_ids"]
        assert found[name]["kept_worst"] > 1 - 1e-5
        assert found[name]["output_error_mean"] < 1e-5
    for name in ("full", "everything", "oracle-everything"):  # a threshold of 1 needs no summaries
        assert found[name]["bytes_read"] == 1
    for name in ("quest-2%", "random-5%"):
        assert found[name]["bytes_read"] < 0.5
        assert found[name]["kept_mean"] < 0.9
        assert found[name]["top1_agreement"] < 1
    assert [row["identity"]["runs_on"] for row in rows] == ["shipped", "shipped", "shipped", "reference", "reference"]
    assert 2350 < found["full"]["prompt_tokens"] <= 2500 - 44

    drawn = plots.main([str(out), "--out", str(tmp_path / "plots")])
    assert [path.name for path in drawn] == [
        f"{kind}-RULER-like-2500.png" for kind in ("accuracy", "kept-mass", "pages-read")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_second_run_measures_only_what_is_missing(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    same = ["--tasks", "qa_1", "--out", str(out)]
    first = tasks.main(arguments(model_path, "--selections", "quest-2%", *same))
    asked = []

    def counting(*args: Any) -> answers.Answer:
        asked.append(args[1])
        return answers.answer(*args)

    monkeypatch.setattr(tasks, "answer", counting)
    assert tasks.main(arguments(model_path, "--selections", "quest-2%", *same)) == first
    assert asked == []
    more = tasks.main(arguments(model_path, "--selections", "quest-2%,everything", *same))
    assert asked == ["everything"]
    assert more[:2] == first
    assert more[2]["answer_ids"] == first[0]["answer_ids"]

    lines = out.read_text(encoding="utf-8").splitlines()
    out.write_text("\n".join([lines[1], lines[2]]) + "\n", encoding="utf-8")  # full attention's row is lost
    again = tasks.main(arguments(model_path, "--selections", "quest-2%,everything", *same))
    assert asked == ["everything", "full"]
    assert by_selection(again) == by_selection(more)

    monkeypatch.setattr(tasks, "commit", lambda: "def")
    with pytest.raises(SystemExit, match="holds rows of commit abc, this is def"):
        tasks.main(arguments(model_path, "--selections", "quest-2%", *same))
    tasks.main(arguments(model_path, "--selections", "quest-2%", "--redo", *same))
    assert asked[2:] == ["full", "quest-2%"]


def test_documents_are_cut_to_their_length_and_scored(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    line = {"input": "A fact. " * 500, "instructions": ["Sum it up.", "What?"], "outputs": ["A fact.", "It."]}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    wanted = ["--tasks", "", "--documents", str(path), "--document-tokens", "1500", "--document-answer-tokens", "5"]
    full, quest = tasks.main(arguments(model_path, "--selections", "quest-2%", *wanted))
    assert full["identity"]["task"] == "reports"
    assert 1480 < full["prompt_tokens"] <= 1495
    assert full["cut_tokens"] > 4000 - 1500
    assert full["references"] == ["A fact."]
    assert quest["bytes_read"] < full["bytes_read"] == 1
    assert len(full["answer_ids"]) == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tasks", "niah"], "--tasks=niah: must be among niah_single_1"),
        (["--selections", "best"], "selections=best: must be among main, psa, hgca, full"),
        (["--lengths", "9999"], "--lengths=9999: the model has 4096 positions"),
        (["--format", "chat"], "style=chat: the tokenizer has no chat template"),
    ],
)
def test_what_cannot_be_run_is_refused(model_path: Path, wrong: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        tasks.main(arguments(model_path, *wrong))
