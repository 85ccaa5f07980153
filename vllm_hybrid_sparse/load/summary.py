"""A report in a few lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_hybrid_sparse.load.figures import LATE_S
from vllm_hybrid_sparse.load.queueing import bounds_text

Json = dict[str, Any]

_TIMES = (
    ("time to first token, ms", "ttft_s"),
    ("time between tokens, ms", "tbt_s"),
    ("time per output token, ms", "tpot_s"),
    ("end to end, ms", "e2e_s"),
)


NO_RATE = "at no tried rate"
_LABEL = 28  # characters of the first column


def summary(report: Json) -> str:
    """Return the main figures of a report, including what failed."""
    lines: list[str] = []
    for server in report["servers"]:
        if server["figures"]:
            lines += _server(server)
    for name, compared in report["ratios"].items():
        found = ", ".join(f"{ratio['figure']} {ratio['better']:.2f}" for ratio in compared)
        some = of_answered(report, name)
        meaning = "above 1 is better" + (f"; {some}" if some else "")
        lines.append(f"{name} against {report['servers'][0]['name']} ({meaning}): {found}")
    if report["capacity"]:
        lines += _capacity(report["capacity"])
        lines += [f"{server['name']}: queueing delay from {queueing_sources(server)}" for server in report["servers"]]
    lines += [f"{server['name']}: {late}" for server in report["servers"] if (late := sent_late(server))]
    return "\n".join(lines)


def sent_late(server: Json) -> str | None:
    """Return by how much a client was too slow to send in time, which latencies do not include; None if it was not."""
    late_s = max((run["figures"]["lag_s"]["p99"] or 0.0 for run in server["runs"]), default=0.0)
    return f"the client is overloaded: P99 of sending late is {late_s:.2f} s" if late_s > LATE_S else None


def of_answered(report: Json, name: str) -> str | None:
    """Return which requests the server `name` is compared with the reference by; None if both answered all."""
    figures = {server["name"]: server["figures"] for server in report["servers"]}
    pair = figures[report["servers"][0]["name"]], figures[name]
    answered = [one["outcomes"].get("ok", 0) for one in pair]
    if all(count == one["planned"] for count, one in zip(answered, pair, strict=True)):
        return None
    return f"of the {answered[0]} and {answered[1]} requests that were answered"


def offered_per_s(runs: Sequence[Json]) -> float | None:
    """Return the requests a second that the arrivals of runs came to, all together; None in a closed loop."""
    offered = [(len(run["requests"]), run["offered_per_s"]) for run in runs if run.get("offered_per_s")]
    return sum(sent for sent, _ in offered) / sum(sent / rate for sent, rate in offered) if offered else None


def capacity_notes(seen: Json) -> Iterator[str]:
    """Yield the caveats to the highest rate that holds, for one server and limit."""
    if seen["too_short"]:
        yield "too few requests to show that this rate is sustained: the queue had no time to grow"
    if seen["holds_per_s"] is not None and seen["fails_per_s"] is None:
        yield "no tried rate failed: a higher one may hold, too"


def queueing_sources(server: Json) -> str:
    """Return where the queueing delays of a server's runs come from."""
    return " and ".join(dict.fromkeys(run["figures"]["queueing"]["source"] for run in server["runs"])) or "no run"


def queueing_delays(queueing: Json, by: float, digits: str) -> list[str]:
    """Return P50, P90 and P99 in seconds times `by`, or their bounds."""
    values = [queueing[part] for part in ("p50_s", "p90_s", "p99_s")]
    if bounds := queueing.get("above_s"):  # reports before schema 2 have none
        return [bounds_text(low * by, high * by) for low, high in zip(bounds, values, strict=True)]
    return ["–" if value is None else f"{value * by:{digits}}" for value in values]


def _server(server: Json) -> Iterator[str]:
    figures = server["figures"]
    outcomes = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items())
    yield (
        f"── {server['name']}: {figures['planned']} requests in {figures['duration_s']:.1f} s: {outcomes}; "
        f"{figures['not_sent']} not sent, {figures['retries']} sent again, {figures['short_answers']} short answers"
    )
    for reason, count in figures["reasons"].items():
        yield f"  {count} × {reason}"
    goodput = "" if figures["goodput_per_s"] is None else f", goodput {figures['goodput_per_s']:.3f}/s"
    offered = "" if (rate := offered_per_s(server["runs"])) is None else f" of {rate:.3f} offered"
    yield (
        f"{figures['requests_per_s']:.3f} requests/s{offered}{goodput}, "
        f"{figures['output_tokens_per_s']:.1f} output tokens/s, {figures['total_tokens_per_s']:.1f} tokens/s in all"
    )
    yield _row("", ("mean", "P50", "P90", "P99", "max"))
    for label, name in _TIMES:
        yield _row(label, [_ms(figures[name][part]) for part in ("mean", "p50", "p90", "p99", "max")])
    yield _row("queueing delay, ms", ["", *queueing_delays(figures["queueing"], 1e3, ".1f"), ""])
    yield f"(queueing delay from {figures['queueing']['source']})"
    sources = figures.get("by_source")  # older reports have none
    if sources:
        yield _row("by source; ms", ("planned", "answered", "TTFT P50", "P99", "TBT P50", "P99"))
        yield from (_row(_cut(name), source_cells(seen, ".1f")) for name, seen in sources.items())


def source_cells(seen: Json, digits: str) -> list[str]:
    """Return the figures of one source: numbers of requests, then times in milliseconds."""
    times = (seen[part] for part in ("ttft_p50_s", "ttft_p99_s", "tbt_p50_s", "tbt_p99_s"))
    shown = ("–" if value is None else f"{value * 1e3:{digits}}" for value in times)
    return [str(seen["planned"]), str(seen["answered"]), *shown]


def _capacity(found: Json) -> Iterator[str]:
    for server in found["servers"]:
        for limit in found["limits"]:
            seen = server["capacity"][limit["name"]]
            ratio = "" if seen["of_reference"] is None else f", {seen['of_reference']:.2f} of the reference"
            yield (
                f"{server['name']}, {limit['name']} (P99 between tokens {limit['p99_tbt_s'] * 1e3:.0f} ms): holds "
                f"{_rate(seen['holds_per_s'])}, fails {_rate(seen['fails_per_s'])}{ratio}"
            )
            yield from (f"  {note}" for note in capacity_notes(seen))
        if server.get("ended"):
            yield f"{server['name']}: the search ended: {server['ended']}"


def _cut(name: str) -> str:
    return name if len(name) <= _LABEL else f"{name[: _LABEL - 1]}…"


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}" + "".join(f" {cell:>11}" for cell in cells)


def _ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{value_s * 1e3:.1f}"


def _rate(value: float | None) -> str:
    return NO_RATE if value is None else f"{value:.3g} requests/s"
