"""How much KV each way of choosing pages needs for 98 % of full attention's accuracy (PSA, figures 2 and 5).

    python -m benchmarks.accuracy.tasks --selections psa --out rows.jsonl
    python -m benchmarks.accuracy.kv_needed FILE... --out DIR [--accuracy 0.98]

For every family it takes the setting that reads least among the measured ones that reach the accuracy; nothing is
interpolated. Rows of `perplexity` also tell how many pages an oracle needs for 0.95 of the weight, by layer: figure 2.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.accuracy.plots import Summary, load, save_figures, title_of
from benchmarks.accuracy.selections import FULL, PROMISE, PSA_FAMILIES, Family
from benchmarks.accuracy.summaries import PERPLEXITY, groups_of
from benchmarks.report import markdown_table

_ACCURACIES = {
    "score": "score",
    "top1_agreement": "top-1 agreement",
    PERPLEXITY: "full perplexity ÷ selection's",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One setting: its accuracy as a share of full attention's, and what it read."""

    selection: str
    accuracy: float
    bytes_read: float  # share of the KV bytes, including retained set and summaries
    pages_read: float  # share of the candidate pages


def points(group: Sequence[Summary], family: Family, column: str) -> list[Point]:
    """The family's settings among the summaries of one measure and length, by what they read, least first.

    raises   ValueError if full attention is not among them, or its own accuracy is 0
    """
    rows = {row["selection"]: row for row in group if column in row}
    if FULL not in rows:
        raise ValueError(f"selection={FULL}: must be among the rows, accuracy is a share of it")
    full = rows[FULL][column]
    if full == 0:
        raise ValueError(f"{column}=0: full attention has no accuracy to take a share of")
    found = [
        Point(
            name,
            full / rows[name][column] if column == PERPLEXITY else rows[name][column] / full,
            rows[name]["bytes_read"],
            rows[name]["pages_read"],
        )
        for name in family.selections
        if name in rows
    ]
    return sorted(found, key=lambda point: point.bytes_read)


def least(found: Sequence[Point], accuracy: float) -> Point | None:
    """The first that reaches the accuracy; None if none does."""
    return next((point for point in found if point.accuracy >= accuracy), None)


def table(summaries: Sequence[Summary], accuracy: float) -> str:
    """What each family needs, as Markdown; "top-k ÷" is the KV of top-k with the same summaries over the family's."""
    lines = []
    for name, group in groups_of(summaries).items():
        for column, label in _ACCURACIES.items():
            if not any(column in row for row in group):
                continue
            topk = {
                family.summary: least(points(group, family, column), accuracy)
                for family in PSA_FAMILIES
                if family.name == "top-k"
            }
            for family in PSA_FAMILIES:
                found = points(group, family, column)
                if not found:
                    continue
                need, other = least(found, accuracy), topk[family.summary]
                lines.append(
                    (
                        ", ".join(name),
                        label,
                        f"{family.name}, {family.summary}",
                        *(
                            (need.selection, f"{need.accuracy:.1%}", f"{need.bytes_read:.1%}", f"{need.pages_read:.1%}")
                            if need
                            else (f"none of {len(found)}", f"at most {max(p.accuracy for p in found):.1%}", "", "")
                        ),
                        f"{other.bytes_read / need.bytes_read:.2f}" if need and other else "",
                    )
                )
    headings = (
        "measure, tokens", "accuracy is", "family", f"least that reaches {accuracy:.0%}", "accuracy reached",
        "KV bytes read", "candidate pages read", "top-k ÷ this",
    )  # fmt: skip
    return markdown_table(headings, lines)


def needed_figures(summaries: Sequence[Summary], accuracy: float) -> dict[str, Figure]:
    """For every measure, length and setting: accuracy against KV bytes read, one line per family (figure 5)."""
    figures: dict[str, Figure] = {}
    for name, group in groups_of(summaries).items():
        columns = [column for column in _ACCURACIES if any(column in row for row in group)]
        if not any(points(group, family, column) for family in PSA_FAMILIES for column in columns):
            continue
        figure, panels = plt.subplots(
            1, len(columns), figsize=(5.5 * len(columns), 4), squeeze=False, layout="constrained"
        )
        for axes, column in zip(panels[0], columns, strict=True):
            for family in PSA_FAMILIES:
                found = points(group, family, column)
                axes.plot(
                    [100 * point.bytes_read for point in found],
                    [100 * point.accuracy for point in found],
                    marker="o",
                    markersize=4,
                    linestyle="--" if family.name == "top-k" else "-",
                    label=f"{family.name}, {family.summary}",
                )
            axes.axhline(100 * accuracy, color="black", linewidth=0.6)
            axes.set(xlabel="KV bytes read, % (summaries included)", ylabel=f"{_ACCURACIES[column]}, % of full")
            axes.grid(alpha=0.3)
        panels[0, 0].legend(fontsize=7)
        figure.suptitle(title_of(name))
        figures["-".join(("kv-needed", *name))] = figure
    return figures


def oracle_figures(summaries: Sequence[Summary]) -> dict[str, Figure]:
    """For every length and setting: how many steps an oracle serves with how many pages, one line per layer."""
    figures: dict[str, Figure] = {}
    full = [row for row in summaries if row["selection"] == FULL and "oracle_deciles" in row]
    for name, (*_, row) in groups_of(full).items():
        figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
        layers, colour = row["oracle_deciles"], plt.colormaps["viridis"]
        for layer, deciles in enumerate(layers):
            if not deciles:  # it has a sliding window
                continue
            axes.plot(100 * np.array(deciles), np.linspace(0, 100, 11), color=colour(layer / len(layers)))
        axes.set(
            xlabel=f"candidate pages that an oracle needs for {PROMISE} of the weight, %",
            ylabel="of the steps and KV heads of a layer, %",
            title=f"{title_of(name)}; dark: first layer, light: last",
        )
        axes.grid(alpha=0.3)
        figures["-".join(("oracle-needs", *name))] = figure
    return figures


def main(arguments: list[str] | None = None) -> list[Path]:
    """Print the table, write the figures, and return their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON) or rows (JSONL)")
    parser.add_argument("--out", required=True, type=Path, help="folder of the figures")
    parser.add_argument("--accuracy", default=0.98, type=float, help="share of full attention's, above 0 and at most 1")
    options = parser.parse_args(arguments)
    if not 0 < options.accuracy <= 1:
        parser.error(f"--accuracy={options.accuracy}: must be above 0 and at most 1")
    summaries = load(options.files)
    try:
        print(table(summaries, options.accuracy))
        figures = needed_figures(summaries, options.accuracy) | oracle_figures(summaries)
    except ValueError as error:
        parser.error(str(error))
    return save_figures(figures, options.out)


if __name__ == "__main__":
    main()
