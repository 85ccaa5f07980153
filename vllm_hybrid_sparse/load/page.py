"""A report as one self-contained HTML page."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from vllm_hybrid_sparse.load.percentiles import percentile
from vllm_hybrid_sparse.load.style import STYLE
from vllm_hybrid_sparse.load.summary import (
    NO_RATE,
    capacity_notes,
    of_answered,
    offered_per_s,
    queueing_delays,
    queueing_sources,
    sent_late,
    source_cells,
)
from vllm_hybrid_sparse.load.svg import Chart, Series, cumulative, draw

_WINDOWS = 30  # points of the chart of the time between tokens over time
_TIMES = (
    ("time to first token, ms", "ttft_s", 1e3),
    ("time between tokens, ms", "tbt_s", 1e3),
    ("… median of each request, ms", "request_median_tbt_s", 1e3),
    ("… P99 of each request, ms", "request_p99_tbt_s", 1e3),
    ("time per output token, ms", "tpot_s", 1e3),
    ("end to end, s", "e2e_s", 1.0),
    ("sent late by, ms", "lag_s", 1e3),
)

_SHORT = ("to first token", "between tokens")

Json = dict[str, Any]


def page(report: Json) -> str:
    """Return the page of a report as `report.document` makes it."""
    body = [
        "<h1>Load on " + escape(", ".join(server["name"] for server in report["servers"])) + "</h1>",
        f"<p>{escape(report['time'])} · {escape(report['machine']['cpu'])}, {report['machine']['cores']} cores · "
        + escape(", ".join(f"{name} {number}" for name, number in report["versions"].items()))
        + f"</p><p><code>{escape(report['command'])}</code></p>",
        *_warnings(report),
        *_capacity(report),
        *(_server(server) for server in report["servers"] if server["figures"]),
        *_ratios(report),
        *_charts(report),
        _definitions(),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load report</title><style>{STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _warnings(report: Json) -> Iterator[str]:
    if report["interrupted"]:
        yield '<p class="warn">Interrupted: this is what was measured until then.</p>'
    for server in report["servers"]:
        every = [run["figures"] for run in server["runs"]]
        lost = sum(figures["planned"] - figures["outcomes"].get("ok", 0) for figures in every)
        retries = sum(figures["retries"] for figures in every)
        short = sum(figures["short_answers"] for figures in every)
        name = escape(server["name"])
        if lost:
            yield f'<p class="warn">{name}: {lost} requests were not answered.</p>'
        if retries:
            yield f'<p class="warn">{name}: {retries} times a request was sent again.</p>'
        if short:
            yield f'<p class="warn">{name}: {short} answers are shorter than asked for.</p>'
        if late := sent_late(server):
            yield f'<p class="warn">{name}: {escape(late)}.</p>'


def _server(server: Json) -> str:
    figures = server["figures"]
    outcomes = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items())
    goodput = "" if figures["goodput_per_s"] is None else f", goodput {figures['goodput_per_s']:.3g}/s"
    offered = "" if (rate := offered_per_s(server["runs"])) is None else f" of {rate:.3g} offered"
    cached = "" if figures["cached_tokens"] is None else f" ({figures['cached_tokens']} from the prefix cache)"
    iteration_s = server["unloaded"]["iteration_s"]
    facts = [
        f"{figures['planned']} requests in {figures['duration_s']:.1f} s: {outcomes}; {figures['not_sent']} not sent, "
        f"{figures['retries']} sent again.",
        f"{figures['requests_per_s']:.3g} requests/s{offered}{goodput}, "
        f"{figures['output_tokens_per_s']:.4g} output tokens/s; "
        f"{figures['prompt_tokens']} tokens of prompts{cached}, {figures['output_tokens']} of answers, at most "
        f"{figures['most_tokens_together']} in one chunk.",
        f"Model {server['model']}, server {server['version'] or 'of unknown version'}, a decode iteration unloaded "
        + ("not known." if iteration_s is None else f"{iteration_s * 1e3:.1f} ms."),
        "Tokens counted by "
        + (", ".join(f"{source} ({count})" for source, count in figures["counted"].items()) or "nothing")
        + f"; queueing delay from {figures['queueing']['source']}.",
    ]
    rows = [
        [
            label,
            figures[name]["count"],
            *(_times(figures[name][part], by) for part in ("mean", "p50", "p90", "p99", "max")),
        ]
        for label, name, by in _TIMES
    ]
    queueing = figures["queueing"]
    rows.append(["queueing delay, s", queueing["requests"], "", *queueing_delays(queueing, 1.0, ".4g"), ""])
    return (
        f"<h2>{escape(server['name'])}</h2>"
        + "".join(f"<p>{escape(fact)}</p>" for fact in facts)
        + _table(("", "values", "mean", "P50", "P90", "P99", "max"), rows)
        + _sources(figures.get("by_source"))  # older reports have none
        + _reasons(figures["reasons"])
    )


def _sources(seen: Json | None) -> str:
    if not seen:
        return ""
    header = ("source", "requests", "answered", *(f"{part} {what}, ms" for what in _SHORT for part in ("P50", "P99")))
    return _table(header, [[name, *source_cells(one, ".4g")] for name, one in seen.items()])


def _reasons(reasons: dict[str, int]) -> str:
    if not reasons:
        return ""
    rows = sorted(reasons.items(), key=lambda item: -item[1])
    return _table(("attempts that did not end well", "number"), rows)


def _ratios(report: Json) -> Iterator[str]:
    names = list(report["ratios"])
    if not names:
        return
    reference = report["servers"][0]["name"]
    yield f"<h2>Against {escape(reference)}</h2><p>Above 1 the other server is the better one.</p>"
    for name in names:
        if some := of_answered(report, name):
            yield f'<p class="warn">{escape(name)}: ratios are {some}.</p>'
        rows = [
            [ratio["figure"].replace("_s ", " ").replace("_per_s", "/s").replace("_", " "),
             _times(ratio["reference"], 1.0), _times(ratio["other"], 1.0), f"{ratio['better']:.2f}"]
            for ratio in report["ratios"][name]
        ]  # fmt: skip
        yield _table(("in s or per s", reference, name, "ratio"), rows)


def _capacity(report: Json) -> Iterator[str]:
    found = report["capacity"]
    if not found:
        return
    rows = [
        [server["name"], limit["name"], _times(limit["p99_tbt_s"], 1e3), *_found(server["capacity"][limit["name"]])]
        for server in found["servers"]
        for limit in found["limits"]
    ]
    yield "<h2>Capacity</h2><p>The highest rate tried at which every request was answered, P99 between tokens kept its "
    yield "limit and median queueing was at most 2 s; and the lowest at which that failed.</p>"
    yield _table(("server", "limit", "P99 limit, ms", "holds, requests/s", "fails, requests/s", "of reference"), rows)
    for server in found["servers"]:
        for name, seen in server["capacity"].items():
            for note in capacity_notes(seen):
                yield f'<p class="warn">{escape(server["name"])}, {escape(name)}: {escape(note)}.</p>'
        if server.get("ended"):
            yield f'<p class="warn">{escape(server["name"])}: the search ended: {escape(server["ended"])}.</p>'
    series, levels = [], [(f"{limit['name']} limit", limit["p99_tbt_s"] * 1e3) for limit in found["limits"]]
    rows = []
    for server, measured in zip(found["servers"], report["servers"], strict=True):
        runs = {run["name"]: run for run in measured["runs"]}
        points = []
        for one in sorted(server["tries"], key=lambda a_try: a_try["rate"]):
            seen, offered = runs[one["run"]]["figures"], offered_per_s([runs[one["run"]]])
            p99_s = seen["tbt_s"]["p99"]
            if p99_s is not None:
                points.append((offered or one["rate"], p99_s * 1e3))
            verdict = "; ".join(f"{name}: {', '.join(broken) or 'holds'}" for name, broken in one["broken"].items())
            rows.append(
                [server["name"], f"{one['rate']:.3g}", _times(offered, 1.0), _times(p99_s, 1e3),
                 queueing_delays(seen["queueing"], 1.0, ".4g")[0], _times(seen["ttft_s"]["p99"], 1.0),
                 f"{seen['output_tokens_per_s']:.4g}", verdict, _commonest(seen["reasons"])]
            )  # fmt: skip
        series.append(Series(server["name"], sorted(points)))
    yield (
        '<div class="charts">'
        + _figure(Chart("Rate against P99 of the time between tokens", "requests/s", "ms", series, levels, log_y=True))
        + "</div>"
    )
    yield _table(
        (
            "server",
            "requests/s",
            "offered/s",
            "P99 tbt, ms",
            "P50 queueing, s",
            "P99 ttft, s",
            "output tokens/s",
            "limits",
            "attempts that did not end well",
        ),
        rows,
    )
    for server in report["servers"]:
        yield f"<p>{escape(server['name'])}: queueing delay from {escape(queueing_sources(server))}.</p>"


def _commonest(reasons: dict[str, int]) -> str:
    """Return the commonest reason why attempts failed, and how many failed for other reasons."""
    if not reasons:
        return "–"
    reason, count = max(reasons.items(), key=lambda item: item[1])
    others = sum(reasons.values()) - count
    return f"{count} × {reason}" + (f"; {others} others" if others else "")


def _charts(report: Json) -> Iterator[str]:
    ttft, gaps, over_time, windows = [], [], [], []
    for server in report["servers"]:
        answered = [(run, one) for run in server["runs"] for one in run["requests"] if one["outcome"] == "ok"]
        planned = sum(run["figures"]["planned"] for run in server["runs"])
        ttft.append(
            Series(server["name"], cumulative([one["arrivals"][0][0] for _, one in answered], of=planned), "steps")
        )
        gaps.append(
            Series(server["name"], cumulative([gap * 1e3 for _, one in answered for gap in _gaps(one)]), "steps")
        )
        starts = _starts(server["runs"])
        over_time.append(
            Series(
                server["name"],
                [(starts[run["name"]] + one["sent_s"], one["arrivals"][0][0]) for run, one in answered],
                "points",
            )
        )
        windows.append(Series(f"{server['name']}, P99", _windows(server["runs"], starts)))
    charts = (
        Chart("Time to first token over time", "sent at, s (runs one after another)", "s", over_time),
        Chart("Time between tokens over time", "s (runs one after another)", "ms", windows),
        Chart("Time to first token, cumulative", "s", "share of planned requests", ttft, y_top=1.0),
        Chart("Time between tokens, cumulative", "ms", "share of gaps", gaps, log_x=True, y_top=1.0),
    )
    yield "<h2>All runs</h2>"
    yield '<div class="charts">' + "".join(map(_figure, charts)) + "</div>"


def _starts(runs: Sequence[Json]) -> dict[str, float]:
    """Return when each run would begin if the runs followed one another without a pause."""
    lengths = [run["figures"]["duration_s"] for run in runs]
    return dict(zip((run["name"] for run in runs), accumulate(lengths, initial=0.0), strict=False))


def _windows(runs: Sequence[Json], starts: dict[str, float]) -> list[tuple[float, float]]:
    """Return the P99 of the times between tokens in equal stretches of the whole time, at the middle of each."""
    ends = [
        (starts[run["name"]] + one["sent_s"] + later[0], (later[0] - earlier[0]) * 1e3)
        for run in runs
        for one in run["requests"]
        if one["outcome"] == "ok"
        for earlier, later in pairwise(one["arrivals"])
    ]
    if not ends:
        return []
    width = max(at for at, _ in ends) / _WINDOWS or 1.0
    stretches: dict[int, list[float]] = {}
    for at, gap in ends:
        stretches.setdefault(min(int(at / width), _WINDOWS - 1), []).append(gap)
    return [((number + 0.5) * width, percentile(values, 99)) for number, values in sorted(stretches.items())]


def _gaps(request: Json) -> list[float]:
    return [later[0] - earlier[0] for earlier, later in pairwise(request["arrivals"])]


def _definitions() -> str:
    return (
        "<h2>Definitions</h2><p>As in <code>vllm bench serve</code>, over requests answered to the end. Time to first "
        "token: from the first sending. Time between tokens: between two arrivals, all requests pooled; tokens that "
        "came together are one arrival. Time per output token: of a request, from its first to its last token over "
        "the number of tokens less one. Queueing delay: until the server first works on a request, by vLLM's own "
        "histogram where the server has one, which tells between what a percentile lies, else the time to first token "
        "less that of a prompt with as many uncached tokens served alone.</p>"
    )


def _figure(chart: Chart) -> str:
    return f"<figure>{draw(chart)}</figure>"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        text = str(value)
        return f'<td class="words">{escape(text)}</td>' if " " in text else f"<td>{escape(text)}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _times(value: float | None, by: float) -> str:
    return "–" if value is None else f"{value * by:.4g}"


def _found(seen: Json) -> list[str]:
    rates = [NO_RATE if rate is None else f"{rate:.3g}" for rate in (seen["holds_per_s"], seen["fails_per_s"])]
    return [*rates, "–" if seen["of_reference"] is None else f"{seen['of_reference']:.2f}"]
