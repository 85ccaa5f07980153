"""Plots of rows that `tasks` and `perplexity` have written: their results, or their `--out` files.

    python -m benchmarks.accuracy.plots FILE... --out DIR

Accuracy against KV bytes read, kept mass by layer and KV head, and maps of the pages read: one figure of each per
length. What was measured with another model, text or other setting gets figures of its own.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.accuracy.rows import read_rows, row_key
from benchmarks.accuracy.selections import FULL
from benchmarks.accuracy.summaries import PERPLEXITY, groups_of, setting_of, summarise

_OF_FULL = "perplexity of full attention's"
_CYCLE = 10  # colours of matplotlib's own cycle
_EXCESS_TICKS = (-20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100)  # %

Summary = dict[str, Any]
Curve = list[tuple[str, float, float, str]]
"""Selection, KV bytes read, what it reached, and what it runs on."""


def load(paths: Sequence[Path]) -> list[Summary]:
    """Summaries of all files; rows of single prompts or windows (`.jsonl`) are summed up over all files together.

    If several of perplexity's results (`.json`) have the same selection, length and setting, the last one named counts.

    raises   ValueError if two files have a row of the same prompt and selection: it would count twice
    """
    summaries: list[Summary] = []
    singles: list[Any] = []
    held: dict[str, str] = {}  # the file by identity
    for path in paths:
        if path.suffix == ".jsonl":
            of_file = {row_key(row["identity"]): row for row in read_rows(path)}
            if twice := [held[key] for key in of_file if key in held]:
                raise ValueError(f"{path.name}: has {len(twice)} rows that {twice[0]} has, too; give one of them")
            held |= dict.fromkeys(of_file, path.name)
            singles += of_file.values()
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        if isinstance(rows, dict):  # perplexity, by selection; earlier results give only the name of a row
            tokens, decoded = map(int, content["size"].split("-"))
            settings = {"decoded": decoded} | ({"text": content["text"]} if "text" in content else {})
            if content.get("kv_cache_dtype", "auto") != "auto":
                settings["kv_cache_dtype"] = content["kv_cache_dtype"]
            known = {"measure": PERPLEXITY, "tokens": tokens, "runs_on": "shipped", "settings": settings}
            rows = [known | {"selection": name} | row for name, row in rows.items()]
            if FULL in content["rows"]:  # of the same run: later kernels may round otherwise
                rows = [row | {_OF_FULL: row[PERPLEXITY] / content["rows"][FULL][PERPLEXITY]} for row in rows]
            made = [_place_of(row) for row in rows]
            summaries = [row for row in summaries if _place_of(row) not in made]
        summaries += rows
    return summaries + summarise(singles)


def _place_of(row: Summary) -> tuple[object, ...]:
    return row["measure"], row["tokens"], row["selection"], setting_of(row)


def curve(summaries: Sequence[Summary], column: str) -> Curve:
    """Points of one measure and length; perplexity as a ratio to full attention's, which must be among them.

    It is full attention's of the same file if that has one, else of the last file with one.
    """
    points = []
    scale = 1.0
    if column == PERPLEXITY:
        full = [row[PERPLEXITY] for row in summaries if row["selection"] == FULL]
        if not full:
            raise ValueError(f"selection={FULL}: must be among the rows, perplexity is shown against it")
        scale = 1 / full[0]
    for row in summaries:
        if column in row:
            value = row[_OF_FULL] if column == PERPLEXITY and _OF_FULL in row else scale * row[column]
            points.append((row["selection"], row["bytes_read"], value, row["runs_on"]))
    return points


def family_of(selection: str) -> tuple[str, str]:
    """A selection's family and its name within the family, as the plots show them.

    `codes2-5%` belongs to "codes2, top-k", `codes2-0.95` to "codes2, threshold"; `full` is a family by itself.
    """
    family, _, parameter = selection.rpartition("-")
    if not family:
        return selection, ""
    kind = ", threshold" if parameter.startswith("0.") else ", top-k" if parameter.endswith("%") else ""
    return family + kind, parameter


def draw_curve(axes: Axes, points: Curve, label: str) -> None:
    """Draw what was reached against the KV bytes read, one line per family; hollow markers: the reference ran."""
    families: dict[str, Curve] = {}
    for point in points:
        families.setdefault(family_of(point[0])[0], []).append(point)
    for colour, (family, members) in enumerate(families.items()):
        members.sort(key=lambda point: point[1])
        (line,) = axes.plot(
            [100 * read for _, read, _, _ in members],
            [reached for _, _, reached, _ in members],
            marker="o",
            markersize=5,
            linewidth=1,
            color=f"C{colour}" if len(families) <= _CYCLE else mpl.colormaps["tab20"](colour % 20),
            markerfacecolor="white" if members[0][3] != "shipped" else None,
            label=family,
        )
        for selection, read, reached, _ in members:
            axes.annotate(
                family_of(selection)[1],
                (100 * read, reached),
                textcoords="offset points",
                xytext=(4, 4),
                fontsize=6,
                color=line.get_color(),
            )
    axes.set_xlabel("KV bytes read, % (summaries included; hollow: reference, not the shipped kernels)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def accuracy_figures(summaries: Sequence[Summary]) -> dict[str, Figure]:
    """A figure for each measure, length and setting: perplexity, or score and agreement, against KV bytes read."""
    figures: dict[str, Figure] = {}
    for name, group in groups_of(summaries).items():
        measure = name[0]
        columns = {PERPLEXITY: "perplexity above full attention's, % (linear below 1 %)"}
        if measure != PERPLEXITY:
            columns = {"score": "mean score, 0 to 1", "top1_agreement": "top-1 agreement with full attention's answer"}
        figure, panels = plt.subplots(
            1, len(columns), figsize=(6.5 * len(columns) + 1.5, 4.5), squeeze=False, layout="constrained"
        )
        for axes, (column, label) in zip(panels[0], columns.items(), strict=True):
            points = curve(group, column)
            if column == PERPLEXITY:
                points = [(name, read, 100 * (ratio - 1), runs_on) for name, read, ratio, runs_on in points]
                axes.set_yscale("symlog", linthresh=1)
            draw_curve(axes, points, label)
            if column == PERPLEXITY:
                low, high = axes.get_ylim()
                ticks = [tick for tick in _EXCESS_TICKS if low <= tick <= high]
                axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panels[0, -1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        figure.suptitle(title_of(name))
        figures["-".join(("accuracy", *name))] = figure
    return figures


def head_figures(summaries: Sequence[Summary]) -> dict[str, Figure]:
    """For each measure, length and setting: kept mass by layer, one point per KV head, and maps of pages read."""
    figures: dict[str, Figure] = {}
    for name, members in groups_of(summaries).items():
        group = [row for row in members if "by_head" in row and row["selection"] != FULL]
        if not group:
            continue
        kept, panels = plt.subplots(
            len(group), 1, figsize=(7, 1.6 * len(group) + 0.8), squeeze=False, sharex=True, layout="constrained"
        )
        for axes, row in zip(panels[:, 0], group, strict=True):
            values = np.array(row["by_head"]["kept"])  # [layers, KV heads]
            for head in range(values.shape[1]):
                axes.plot(values[:, head], "o", markersize=3, label=f"KV head {head}")
            axes.plot(values.mean(axis=1), color="black", linewidth=0.8, label="mean")
            axes.set(ylim=(0, 1.03), ylabel="kept mass", title=f"{row['selection']} ({row['runs_on']})")
        panels[0, 0].legend(fontsize=6, ncols=4)
        panels[-1, 0].set_xlabel("layer")
        maps, panels = plt.subplots(
            1, len(group), figsize=(1.5 * len(group) + 1.5, 6), squeeze=False, sharey=True, layout="constrained"
        )
        for axes, row in zip(panels[0], group, strict=True):
            image = axes.imshow(row["by_head"]["pages_read"], vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axes.set_title(row["selection"], fontsize=8)
            axes.set_xlabel("KV head")
        panels[0, 0].set_ylabel("layer")
        maps.colorbar(image, ax=list(panels[0]), label="share of the candidate pages read")
        kept.suptitle(title_of(name))
        figures |= {"-".join(("kept-mass", *name)): kept, "-".join(("pages-read", *name)): maps}
    return figures


def title_of(name: tuple[str, ...]) -> str:
    """The title of the figures of a group from `groups_of`."""
    measure, tokens, *setting = name
    return ", ".join((measure, f"{tokens} tokens", *setting))


def save_figures(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write the figures as PNG files named after them, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name.replace(' ', '-')}.png"
        figure.savefig(path, dpi=100)
        plt.close(figure)
        print(path)
        written.append(path)
    return written


def main(arguments: list[str] | None = None) -> list[Path]:
    """Write the plots as PNG files, and return their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results (JSON) or rows (JSONL)")
    parser.add_argument("--out", required=True, type=Path, help="folder")
    options = parser.parse_args(arguments)
    summaries = load(options.files)
    return save_figures(accuracy_figures(summaries) | head_figures(summaries), options.out)


if __name__ == "__main__":
    main()
