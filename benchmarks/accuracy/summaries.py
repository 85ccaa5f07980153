"""Rows of single prompts or windows, summed up by measure, length and selection."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.accuracy.ruler import TASKS
from benchmarks.accuracy.selections import FULL
from benchmarks.report import markdown_table

RULER, PERPLEXITY = "RULER-like", "perplexity"

_SHOWN = {  # of a summary: headings of the table
    "score": "score",
    "score_difference": "above full's",
    "score_difference_error": "its standard error",
    "top1_agreement": "top-1 agreement",
    "equal_before_difference": "equal before difference",
    "exactly_equal": "equal",
    "bytes_read": "KV bytes read",
    "kept_mean": "kept, mean",
    "kept_at_least_0.95": "kept ≥ 0.95",
    "output_error_mean": "output error",
}


def measure_of(identity: Mapping[str, Any]) -> str:
    """What a row is summed up under: all RULER-like tasks together, each file of documents, perplexity."""
    return RULER if identity["task"] in TASKS else str(identity["task"])


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each measure, length, selection and model, in the order of the first of its rows.

    Means are over the samples of a task, then over the tasks, so that every task counts the same; `kept_worst` is the
    worst of all, `bytes_read` of rows with `read_bytes` and `total_bytes` the share of their means, `perplexity` the
    exponential of the mean `loss`, `tasks` the score of each task. Deciles of single prompts or windows are averaged.
    Where full attention has answered the same prompts, `score_difference` is how far the score lies above its score,
    and `score_difference_error` the standard error of that over the prompts.
    """
    rows = list(rows)
    full = {_prompt_of(row): row["score"] for row in rows if row["identity"]["selection"] == FULL and "score" in row}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        identity = row["identity"]
        groups[
            measure_of(identity),
            identity["tokens"],
            identity["selection"],
            identity["runs_on"],
            identity["model"],
            identity["dtype"],
        ].append(row)
    names = ("measure", "tokens", "selection", "runs_on", "model", "dtype")
    return [
        dict(zip(names, group, strict=True)) | _means(members) | _score_difference(members, full)
        for group, members in groups.items()
    ]


def _prompt_of(row: Mapping[str, Any]) -> str:
    """All that identifies a row but how it was answered."""
    return json.dumps({name: value for name, value in row["identity"].items() if name not in ("selection", "runs_on")})


def _score_difference(rows: list[Mapping[str, Any]], full: Mapping[str, float]) -> dict[str, float]:
    """The mean difference of the scores from full attention's and its standard error, prompts drawn from each task.

    The error is left out where a task has one prompt, since nothing is known of how its prompts differ then. Empty
    where full attention has not answered every prompt, and of its own rows.
    """
    if rows[0]["identity"]["selection"] == FULL or any(_prompt_of(row) not in full for row in rows):
        return {}
    by_task: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_task[row["identity"]["task"]].append(row["score"] - full[_prompt_of(row)])
    difference = {"score_difference": float(np.mean([np.mean(part) for part in by_task.values()]))}
    if min(map(len, by_task.values())) < 2:
        return difference
    variance = sum(np.var(part, ddof=1) / len(part) for part in by_task.values()) / len(by_task) ** 2
    return difference | {"score_difference_error": math.sqrt(variance)}


def _means(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    by_task: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_task[row["identity"]["task"]].append(row)
    numbers = [
        name for name, value in rows[0].items() if isinstance(value, (int, float)) and all(name in row for row in rows)
    ]
    means: dict[str, Any] = {
        name: float(np.mean([np.mean([row[name] for row in members]) for members in by_task.values()]))
        for name in numbers
    }
    if means.get("total_bytes"):
        means["bytes_read"] = means["read_bytes"] / means["total_bytes"]
    if "kept_worst" in means:
        means["kept_worst"] = min(row["kept_worst"] for row in rows)
    if "loss" in means:
        means["perplexity"] = math.exp(means.pop("loss"))
    if "score" in means:
        means["tasks"] = {task: float(np.mean([row["score"] for row in members])) for task, members in by_task.items()}
    heads = [row["by_head"] for row in rows if row.get("by_head")]
    if heads:
        means["by_head"] = {
            name: np.mean([head[name] for head in heads], axis=0).round(4).tolist() for name in heads[0]
        }
    deciles = [row["oracle_deciles"] for row in rows if row.get("oracle_deciles")]
    if deciles:
        by_layer = zip(*deciles, strict=True)
        means["oracle_deciles"] = [np.mean(layer, axis=0).round(4).tolist() if layer[0] else [] for layer in by_layer]
    return {"prompts": len(rows), "commits": sorted({str(row["commit"]) for row in rows}), **means}


def table(summaries: list[dict[str, Any]]) -> str:
    """The task summaries as Markdown."""
    lines = [
        [
            row["measure"],
            str(row["tokens"]),
            row["selection"],
            row["runs_on"],
            str(row["prompts"]),
            *(f"{row[name]:.1%}" if name in row else "" for name in _SHOWN),
        ]
        for row in summaries
    ]
    return markdown_table(["measure", "tokens", "selection", "runs on", "prompts", *_SHOWN.values()], lines)
