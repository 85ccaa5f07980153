"""What must hold at the end of a soak."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.soak.readings import COUNTERS, IDLE, JUDGED, Reading

ALLOWED_GROWTH = 0.02  # of resident memory, from when the server has settled to the end
_OURS = "vllm_hybrid_sparse_"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that must hold, with what was seen."""

    name: str
    seen: str
    held: bool


def settled(readings: Sequence[Reading], after_s: float) -> Reading:
    """Return the reading from which growth counts: the first at `after_s` or later, else the last but one."""
    return next((reading for reading in readings[:-1] if reading.awake_s >= after_s), readings[-2])


def rules(
    readings: Sequence[Reading], tally: dict[str, int], asked_s: float, after_s: float, heads: int, tokens_seen: int
) -> Iterator[Rule]:
    """Judge a soak by its readings (two at least, the first before the load) and by what its clients counted.

    asked_s       how long the load should last
    after_s       when the server counts as settled
    heads         layers times KV heads: how often a decode row chooses what to read
    tokens_seen   tokens that clients were given
    """
    lasted_s = readings[-1].awake_s
    yield Rule("minutes of load", f"{lasted_s / 60:.1f} of {asked_s / 60:g}", lasted_s >= asked_s)
    yield Rule("answers checked", str(tally.get("right", 0)), tally.get("right", 0) > 0)
    bad = {kind: f"{kind} answers" for kind in ("wrong", "lost", "unexpected")} | {"server errors": "server errors"}
    for kind, name in bad.items():
        yield Rule(name, str(tally.get(kind, 0)), not tally.get(kind, 0))
    last = readings[-1]
    for name in IDLE:
        left = [reading.counters.get(name) for reading in readings]
        yield Rule(f"{name} at rest", " ".join(map(str, left)), all(value == 0 for value in left))
    base = settled(readings, after_s)
    for name in JUDGED:
        before, after = base.processes[name], last.processes[name]
        growth = after.resident_bytes / before.resident_bytes - 1
        yield Rule(f"{name}: memory", f"{growth:+.2%}", growth <= ALLOWED_GROWTH)
        yield Rule(f"{name}: threads", f"{before.threads} to {after.threads}", after.threads <= before.threads)
        yield Rule(f"{name}: files", f"{before.files} to {after.files}", after.files <= before.files)
    yield from _counters(readings[0], last, heads, tokens_seen)


def _counters(first: Reading, last: Reading, heads: int, tokens_seen: int) -> Iterator[Rule]:
    missing = [name for name in COUNTERS if name not in last.counters]
    yield Rule("metrics there", f"{len(COUNTERS) - len(missing)} of {len(COUNTERS)}", not missing)
    if missing:
        return
    since = {name: last.counters[name] - first.counters[name] for name in COUNTERS}
    fell = [name for name in COUNTERS if name.endswith("_total") and since[name] < 0]
    yield Rule("counters never fall", ", ".join(fell) or "none fell", not fell)
    generated, rows = since["vllm:generation_tokens_total"], since[f"{_OURS}decode_rows_total"]
    yield Rule(
        "tokens counted are at least those received", f"{generated:.0f}, {tokens_seen}", generated >= tokens_seen
    )
    prompts = since["vllm:time_to_first_token_seconds_count"]
    yield Rule(
        "every token but a prompt's first has a decode row", f"{rows:.0f}, {generated - prompts:.0f}",
        rows >= generated - prompts,
    )  # fmt: skip
    selections = since[f"{_OURS}selections_total"]
    yield Rule("selections of each row", f"{selections / max(rows, 1):g}, {heads}", selections == rows * heads)
    read, context = since[f"{_OURS}read_pages_total"], since[f"{_OURS}context_pages_total"]
    yield Rule("pages read of the context", f"{read / max(context, 1):.1%}", 0 < read <= context)
    judged, stops = since[f"{_OURS}judged_selections_total"], since[f"{_OURS}early_stops_total"]
    yield Rule("early stops among what was judged", f"{stops:.0f} of {judged:.0f}", stops <= judged <= selections)
    mass = since[f"{_OURS}kept_mass_total"]
    yield Rule("kept weight of what was judged", f"{mass / max(judged, 1):.4f}", 0 <= mass <= judged)
    yield Rule("preemptions", f"{since['vllm:num_preemptions_total']:.0f}", since["vllm:num_preemptions_total"] == 0)
    yield Rule(
        "packed bytes", f"{last.counters[f'{_OURS}packed_bytes']:.0f}", last.counters[f"{_OURS}packed_bytes"] == 0
    )
