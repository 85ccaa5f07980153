"""Rows of single prompts or windows, summed up by measure, length, selection and everything else in their setting."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.selections import FULL
from benchmarks.report import markdown_table
from vllm_hybrid_sparse.load.ruler import TASKS

RULER, PERPLEXITY = "RULER-like", "perplexity"

_OF_A_PROMPT = ("task", "sample", "window")  # keys of an identity that a mean is taken over
_NAMED = ("tokens", "selection", "runs_on", "model", "dtype")  # keys of an identity that a summary has, too

_SHOWN = {  # keys of a summary: headings of the table
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
    """The measure that a row belongs to: all RULER-like tasks together, each file of documents, perplexity."""
    return RULER if identity["task"] in TASKS else str(identity["task"])


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One summary for each measure, length, selection and setting, in the order of their first rows.

    `settings` has the rest of the rows' identity, such as the text, the format or the dtype of the KV cache. Means are
    over the samples of a task, then over the tasks, so every task counts the same. `kept_worst` is the worst of all;
    `bytes_read` of rows with `read_bytes` and `total_bytes` is the ratio of their means; `perplexity` is the
    exponential of the mean `loss`; `tasks` has the score of each task. Deciles of single prompts or windows are
    averaged. If full attention has answered the same prompts, `score_difference` is the score less full attention's,
    and `score_difference_error` is its standard error over the prompts.
    """
    rows = list(rows)
    full = {_prompt_of(row): row["score"] for row in rows if row["identity"]["selection"] == FULL and "score" in row}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        identity = row["identity"]
        named = (measure_of(identity), *(identity[name] for name in _NAMED))
        groups[*named, json.dumps(_settings(identity), sort_keys=True)].append(row)
    return [
        dict(zip(("measure", *_NAMED), named, strict=True))
        | {"settings": _settings(members[0]["identity"])}
        | _means(members)
        | _score_difference(members, full)
        for (*named, _), members in groups.items()
    ]


def _settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name not in (*_OF_A_PROMPT, *_NAMED)}


def setting_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """All that a summary was measured with, except length and selection; earlier results do not say all of it."""
    setting = {name: summary[name] for name in ("model", "dtype") if name in summary}
    setting |= summary.get("settings", {})
    return setting


def groups_of(summaries: Sequence[dict[str, Any]]) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Summaries that may be compared, by measure, length, and the settings in which others with these two differ."""
    by_size: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in summaries:
        by_size[str(row["measure"]), str(row["tokens"])].append(row)
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for size, rows in by_size.items():
        settings = [setting_of(row) for row in rows]
        for row, setting in zip(rows, settings, strict=True):
            differs = {name for name in setting for other in settings if other.get(name) != setting[name]}
            groups[*size, *(f"{name}={setting[name]}" for name in setting if name in differs)].append(row)
    return groups


def _prompt_of(row: Mapping[str, Any]) -> str:
    """All that identifies a row, except how it was answered."""
    return json.dumps({name: value for name, value in row["identity"].items() if name not in ("selection", "runs_on")})


def _score_difference(rows: list[Mapping[str, Any]], full: Mapping[str, float]) -> dict[str, float]:
    """The mean of the scores less full attention's, and its standard error, with prompts as samples of each task.

    The error is left out if a task has only one prompt, since then nothing is known of how its prompts differ. Empty if
    full attention has not answered every prompt, and for its own rows.
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
