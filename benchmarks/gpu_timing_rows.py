"""Rounds of `gpu_timing`, their figures, and the table that compares the sides."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import markdown_table
from vllm_hybrid_sparse.load.prometheus import total

BASELINE = "baseline"
FIXED = "fixed"
HYBRID = "hybrid"
OFFLOAD = "offload"
WARM_UP_TOKENS = 4  # of every answer, not counted
_COUNTED = (
    "context_bytes", "read_bytes", "device_step_seconds", "device_busy_seconds", "device_wanted_pages",
    "device_hit_pages", "device_failed_loads",
)  # fmt: skip

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Requests of one length at the same time."""

    context_tokens: int
    requests: int

    @property
    def name(self) -> str:
        """The name that `parse_case` takes."""
        return f"{self.context_tokens // 1024}Kx{self.requests}"


def parse_case(name: str) -> Case:
    """`8Kx32`: 32 requests over 8192 tokens each. Raises ValueError."""
    tokens, _, requests = name.partition("Kx")
    if not (tokens.isdecimal() and requests.isdecimal() and int(tokens) and int(requests)):
        raise ValueError(f"cases={name}: must be a context in K tokens and a number of requests, such as 32Kx4")
    return Case(context_tokens=1024 * int(tokens), requests=int(requests))


def together(came: Sequence[Sequence[tuple[float, int]]]) -> dict[str, float]:
    """Figures of the time in which all requests decode, without each one's first tokens.

    came   for each request, pairs of a time (s) and the number of tokens it had by then
    """
    begin_s = max(next(at_s for at_s, count in one if count >= WARM_UP_TOKENS) for one in came)
    end_s = min(one[-1][0] for one in came)
    spans = [[moment for moment in one if begin_s <= moment[0] <= end_s] for one in came]
    if any(len(span) < 2 for span in spans):
        raise ValueError("the requests did not run side by side: fewer tokens in flight, or more room, are needed")
    step_s = [(span[-1][0] - span[0][0]) / (span[-1][1] - span[0][1]) for span in spans]
    return {"step_ms": 1e3 * statistics.mean(step_s), "tokens_per_s": sum(1 / one for one in step_s)}


def whole_round(came: Sequence[Sequence[tuple[float, int]]], began_s: float) -> dict[str, float]:
    """The rate over a whole round, from when its requests were handed over until the last one has all its tokens.

    came   as in `together`
    """
    return {"round_tokens_per_s": sum(one[-1][1] for one in came) / (max(one[-1][0] for one in came) - began_s)}


def counters(exposition: str) -> dict[str, float]:
    """Sums of the counters in `_COUNTED`, from Prometheus's text; absent ones are left out."""
    found = {name: total(exposition, f"vllm_hybrid_sparse_{name}_total") for name in _COUNTED}
    return {name: value for name, value in found.items() if value is not None}


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Shares in one round: KV bytes read, wanted pages found in the pool, step time in which the device was idle.

    Raises RuntimeError if loads failed: then the host computed what the device should have, and times are the host's.
    """
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if failed := grown.get("device_failed_loads"):
        raise RuntimeError(f"{failed:.0f} loads to the device failed; the log says why")
    shares = {}
    if grown.get("context_bytes"):
        shares["kv_read"] = grown["read_bytes"] / grown["context_bytes"]
    if grown.get("device_wanted_pages"):
        shares["hit_rate"] = grown["device_hit_pages"] / grown["device_wanted_pages"]
    if grown.get("device_step_seconds"):
        shares["device_idle"] = 1 - grown["device_busy_seconds"] / grown["device_step_seconds"]
    return shares


def summarise(rounds: Sequence[Json]) -> list[Json]:
    """A row per case and side: medians of all rounds but the first; ratios to the sides that others are compared to."""
    groups: dict[tuple[str, str], list[Json]] = {}
    traced: dict[tuple[str, str], Json] = {}
    for row in rounds:
        if "traced_idle" in row:
            traced[row["case"], row["side"]] = {"traced_idle": row["traced_idle"]}
        elif row["round"]:
            groups.setdefault((row["case"], row["side"]), []).append(row)
    names = ("step_ms", "tokens_per_s", "round_tokens_per_s", "kv_read", "hit_rate", "device_idle")
    rows: dict[tuple[str, str], Json] = {}
    for key, group in groups.items():
        had = [name for name in names if all(name in row for row in group)]
        rows[key] = {name: statistics.median(row[name] for row in group) for name in had} | traced.get(key, {})

    def ratios(case: str, row: Json) -> Json:
        found = {}
        for reference in (BASELINE, FIXED, HYBRID):
            other = rows.get((case, reference), {})
            if "step_ms" in row and "step_ms" in other:
                found[f"{reference}_over_this"] = other["step_ms"] / row["step_ms"]
        other = rows.get((case, OFFLOAD), {})
        if "round_tokens_per_s" in row and "round_tokens_per_s" in other:
            found[f"this_over_{OFFLOAD}"] = row["round_tokens_per_s"] / other["round_tokens_per_s"]
        return found

    return [{"case": case, "side": side, **row, **ratios(case, row)} for (case, side), row in rows.items()]


def table(rows: Sequence[Json], baseline: str) -> str:
    """The rows as Markdown."""

    def shown(row: Json, name: str, form: str) -> str:
        return format(row[name], form) if name in row else ""

    return markdown_table(
        (
            "case",
            "side",
            "ms a token",
            "tokens/s",
            f"{baseline} ÷ it",
            "fixed ÷ it",
            "hybrid ÷ it",
            "whole round, tokens/s",
            "it ÷ offload",
            "KV read",
            "hits",
            "device idle",
            "GPU idle in trace",
        ),
        [
            (
                row["case"],
                row["side"],
                shown(row, "step_ms", ".2f"),
                shown(row, "tokens_per_s", ".0f"),
                shown(row, f"{BASELINE}_over_this", ".2f"),
                shown(row, f"{FIXED}_over_this", ".2f"),
                shown(row, f"{HYBRID}_over_this", ".2f"),
                shown(row, "round_tokens_per_s", ".0f"),
                shown(row, f"this_over_{OFFLOAD}", ".2f"),
                shown(row, "kv_read", ".1%"),
                shown(row, "hit_rate", ".1%"),
                shown(row, "device_idle", ".0%"),
                shown(row, "traced_idle", ".0%"),
            )
            for row in sorted(rows, key=lambda row: parse_case(row["case"]))
        ],
    )
