"""Means over rows, and what plots show of them, worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.plots import accuracy_figures, curve, family_of, head_figures, load
from benchmarks.accuracy.summaries import summarise, table


def row(task: str, selection: str, setting: dict[str, Any] | None = None, **measured: Any) -> dict[str, Any]:
    identity = {"task": task, "tokens": 1024, "selection": selection, "runs_on": "shipped", "model": "m", "dtype": "d"}
    return {"commit": "abc", "identity": identity | (setting or {}), **measured}


ROWS = [
    row("vt", "full", score=1.0, bytes_read=1.0, kept_worst=0.9, by_head={"kept": [[1.0, 0.5]]}),
    row("vt", "full", score=0.0, bytes_read=1.0, kept_worst=0.4, by_head={"kept": [[0.5, 0.5]]}),
    row("qa_1", "full", score=1.0, bytes_read=0.4, kept_worst=0.8, by_head={"kept": [[0.0, 0.5]]}),
    row("reports", "full", score=0.25, bytes_read=1.0),
]


def test_every_task_counts_the_same_however_many_samples_it_has() -> None:
    ruler, reports = summarise(ROWS)
    assert (ruler["measure"], ruler["tokens"], ruler["selection"], ruler["prompts"]) == ("RULER-like", 1024, "full", 3)
    assert ruler["score"] == 0.75
    assert abs(ruler["bytes_read"] - 0.7) < 1e-12
    assert ruler["kept_worst"] == 0.4
    assert ruler["tasks"] == {"vt": 0.5, "qa_1": 1.0}
    assert ruler["by_head"] == {"kept": [[0.5, 0.5]]}
    assert ruler["commits"] == ["abc"]
    assert (reports["measure"], reports["score"]) == ("reports", 0.25)
    assert "by_head" not in reports
    assert "75.0%" in table([ruler])


def test_bytes_of_answers_of_different_lengths_are_added_up() -> None:
    long, short = row("vt", "quest-2%", read_bytes=30.0, total_bytes=100.0), row("vt", "quest-2%")
    short |= {"read_bytes": 0.0, "total_bytes": 0.0}  # an answer of one token, which no decode step made
    (both,) = summarise([long, short])
    assert both["bytes_read"] == 0.3


def answered(task: str, sample: int, selection: str, score: float) -> dict[str, Any]:
    one = row(task, selection, score=score)
    one["identity"]["sample"] = sample
    return one


def test_scores_are_compared_with_full_attentions_prompt_by_prompt() -> None:
    full = [answered("vt", 0, "full", 1.0), answered("vt", 1, "full", 0.0), answered("qa_1", 0, "full", 0.5)]
    full.append(answered("qa_1", 1, "full", 0.5))
    ours = [answered("qa_1", 1, "quest-2%", 0.5), answered("vt", 1, "quest-2%", 0.0)]
    ours += [answered("vt", 0, "quest-2%", 0.0), answered("qa_1", 0, "quest-2%", 0.5)]
    of_full, of_quest = summarise([*full, *ours])
    assert "score_difference" not in of_full
    assert of_quest["score_difference"] == -0.25
    assert of_quest["score_difference_error"] == pytest.approx(0.25)  # for -1 and 0 it is 1/2, and vt is half of all
    assert "-25.0%" in table([of_quest])
    (alone,) = summarise(ours)
    assert "score_difference" not in alone
    single = summarise([full[0], full[2], ours[2], ours[3]])[1]
    assert single["score_difference"] == -0.5
    assert "score_difference_error" not in single


def perplexity_rows() -> list[dict[str, Any]]:
    return [
        row("perplexity", "full", loss=2.0, bytes_read=1.0),
        row("perplexity", "full", loss=4.0, bytes_read=1.0),
        row("perplexity", "quest-2%", loss=3.5, bytes_read=0.1),
    ]


def test_perplexity_is_of_the_mean_loss_and_plotted_against_full_attentions() -> None:
    summaries = summarise(perplexity_rows())
    assert summaries[0]["perplexity"] == math.exp(3.0)
    points = curve(summaries, "perplexity")
    assert [point[:2] for point in points] == [("full", 1.0), ("quest-2%", 0.1)]
    assert points[0][2] == 1.0
    assert abs(points[1][2] - math.exp(0.5)) < 1e-12
    with pytest.raises(ValueError, match="selection=full"):
        curve(summaries[1:], "perplexity")


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("perplexity", [{"text": "a.txt"}, {"text": "b.txt"}]),
        ("perplexity", [{"decoded": 256}, {"decoded": 1024}]),
        ("perplexity", [{}, {"kv_cache_dtype": "fp8"}]),
        ("vt", [{"format": "chat"}, {"format": "plain"}]),
        ("vt", [{"seed": 0}, {"seed": 1}]),
        ("reports", [{"new_tokens": 64}, {"new_tokens": 128}]),
    ],
)
def test_rows_of_other_settings_are_summed_up_by_themselves(task: str, settings: list[dict[str, Any]]) -> None:
    rows = [
        row(task, "full", setting | {"sample": sample, "window": sample}, loss=2.0 + number, score=float(number))
        for number, setting in enumerate(settings)
        for sample in range(2)
    ]
    summaries = summarise(rows)
    assert [one["settings"] for one in summaries] == settings
    assert [one["prompts"] for one in summaries] == [2, 2]
    assert [one["score"] for one in summaries] == [0.0, 1.0]


def test_what_was_measured_with_other_settings_is_drawn_by_itself() -> None:
    bf16, fp8 = {"text": "a.txt"}, {"text": "a.txt", "kv_cache_dtype": "fp8"}
    rows = [
        row("perplexity", "full", bf16, loss=2.0, bytes_read=1.0),
        row("perplexity", "full", fp8, loss=3.0, bytes_read=1.0),
        row("perplexity", "quest-2%", fp8, loss=3.5, bytes_read=0.1),
        row("perplexity", "full", {"text": "b.txt"} | {"tokens": 2048}, loss=2.0, bytes_read=1.0),
    ]
    figures = accuracy_figures(summarise(rows))
    assert list(figures) == [
        "accuracy-perplexity-1024", "accuracy-perplexity-1024-kv_cache_dtype=fp8", "accuracy-perplexity-2048",
    ]  # fmt: skip
    lines = figures["accuracy-perplexity-1024-kv_cache_dtype=fp8"].axes[0].lines
    assert [line.get_label() for line in lines] == ["full", "quest, top-k"]
    assert lines[1].get_ydata() == pytest.approx([100 * (math.exp(0.5) - 1)])


def test_perplexities_of_one_selection_and_other_settings_are_both_kept(tmp_path: Path) -> None:
    paths = []
    for name, kv_cache_dtype in (("a", "auto"), ("b", "fp8"), ("c", "fp8")):
        rows = {"full": {"perplexity": 12.0, "bytes_read": 1.0, "model": "m", "dtype": "d"}}
        content = {"size": "4096-256", "text": "t.txt", "kv_cache_dtype": kv_cache_dtype, "rows": rows}
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(content), encoding="utf-8")
    of_text = {"decoded": 256, "text": "t.txt"}
    assert [one["settings"] for one in load(paths)] == [of_text, of_text | {"kv_cache_dtype": "fp8"}]


def test_a_row_that_two_files_have_is_not_counted_twice(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROWS[2]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.jsonl: has 1 rows that a\.jsonl has, too"):
        load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_rows_and_results_are_both_read(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in perplexity_rows()), encoding="utf-8")
    tasks = tmp_path / "tasks-1.json"
    tasks.write_text(json.dumps({"commit": "abc", "rows": summarise(ROWS)}), encoding="utf-8")
    earlier = tmp_path / "perplexity-1.json"
    rows = {"full": {"perplexity": 12.0, "bytes_read": 1.0}, "quest-2%": {"perplexity": 15.0, "bytes_read": 0.2}}
    earlier.write_text(json.dumps({"size": "4096-256", "rows": rows}), encoding="utf-8")
    found = load([lines, tasks, earlier])
    kinds = [(one["measure"], one["tokens"], one["selection"]) for one in found]
    assert kinds == [
        ("RULER-like", 1024, "full"), ("reports", 1024, "full"),
        ("perplexity", 4096, "full"), ("perplexity", 4096, "quest-2%"),
        ("perplexity", 1024, "full"), ("perplexity", 1024, "quest-2%"),
    ]  # fmt: skip
    assert curve(found[2:4], "perplexity")[1] == ("quest-2%", 0.2, 1.25, "shipped")


@pytest.mark.parametrize(
    ("selection", "family", "parameter"),
    [
        ("full", "full", ""),
        ("codes2-5%", "codes2, top-k", "5%"),
        ("psa-codes2-0.95", "psa-codes2, threshold", "0.95"),
        ("fluxion-codes2-16", "fluxion-codes2", "16"),
    ],
)
def test_selections_that_differ_by_one_number_are_a_family(selection: str, family: str, parameter: str) -> None:
    assert family_of(selection) == (family, parameter)


def test_there_is_a_figure_for_what_was_measured_and_none_for_what_was_not() -> None:
    heads = {"kept": [[0.5, 0.25]], "pages_read": [[0.1, 0.2]], "output_error": [[0.0, 0.1]]}
    agreed = {"score": 0.5, "top1_agreement": 0.5, "bytes_read": 0.5}
    summaries = summarise([row("vt", "quest-2%", **agreed, by_head=heads), *perplexity_rows()])
    accuracy = accuracy_figures(summaries)
    assert list(accuracy) == ["accuracy-RULER-like-1024", "accuracy-perplexity-1024"]
    axes = accuracy["accuracy-perplexity-1024"].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["full", "quest, top-k"]
    assert [text.get_text() for text in axes.texts] == ["", "2%"]
    by_head = head_figures(summaries)
    assert list(by_head) == ["kept-mass-RULER-like-1024", "pages-read-RULER-like-1024"]
    drawn = by_head["pages-read-RULER-like-1024"].axes[0].images[0].get_array()
    assert drawn.tolist() == [[0.1, 0.2]]
