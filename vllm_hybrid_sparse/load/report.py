"""The results of a measurement as one JSON document, including all raw times."""

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_hybrid_sparse import __version__
from vllm_hybrid_sparse.load.arrivals import ClosedLoop, Schedule
from vllm_hybrid_sparse.load.capacity import Slo
from vllm_hybrid_sparse.load.exchange import Record
from vllm_hybrid_sparse.load.figures import Limits, figures
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.search import Capacity
from vllm_hybrid_sparse.load.side import Measured, Side
from vllm_hybrid_sparse.load.traces import write_text
from vllm_hybrid_sparse.load.turns import Load, Results, ratios

SCHEMA = 2  # goes up by one when a reader of old reports would misread a new one


_PLACE = re.compile(r"""(?<![\w.~/:])~?/(?:[^/\s,"']+/)*(?=[^/\s,"'])""")


def without_places(text: str) -> str:
    """Return `text` with each absolute path in it cut to its last name; URLs and relative paths stay."""
    return _PLACE.sub("", text)


def document(
    load: Load,
    all_results: Sequence[Results],
    *,
    limits: Limits | None,
    slos: Sequence[Slo] = (),
    searches: Sequence[Capacity] = (),
    settings: dict[str, Any],
    command: Sequence[str],
    interrupted: bool,
    keep_text: bool = False,
) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON.

    settings    what was asked for, by option
    command     the command line; paths in it are cut to their last name, and an API key is never part of it
    keep_text   keep the text of the answers too
    """
    reference, *others = all_results
    pooled = {results.side.name: results.figures(limits) for results in all_results if results.runs and not searches}
    return {
        "schema": SCHEMA,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(map(without_places, command)),
        "versions": _versions(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()},
        "settings": {name: _place_free(value) for name, value in settings.items()},
        "interrupted": interrupted,
        "trace": _trace(load.requests),
        "salt": load.salt,
        "servers": [
            _server(results.side)
            | {
                "runs": [
                    _run(name, schedule, measured, results.side, limits, keep_text)
                    for name, schedule, measured in results.runs
                ],
                "figures": asdict(pooled[results.side.name]) if results.side.name in pooled else None,
            }
            for results in all_results
        ],
        "ratios": {
            other.side.name: [asdict(ratio) for ratio in ratios(pooled[reference.side.name], pooled[other.side.name])]
            for other in others
            if reference.side.name in pooled and other.side.name in pooled
        },
        "capacity": _capacity(searches, slos) if searches else None,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report; it must hold no NaN, since JSON has none."""
    write_text(path, json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")


def _versions() -> dict[str, str]:
    found = {"vllm-hybrid-sparse": __version__, "python": platform.python_version()}
    try:
        found["aiohttp"] = version("aiohttp")
    except PackageNotFoundError:  # vendored without its metadata
        found["aiohttp"] = "unknown"
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _place_free(value: Any) -> Any:
    if isinstance(value, str | Path):
        return without_places(str(value))
    if isinstance(value, list | tuple):
        return [_place_free(item) for item in value]
    return value


def trace_digest(requests: Sequence[Request]) -> str:
    """Return a digest of the requests that depends on their prompts, lengths and order."""
    return hashlib.sha256(repr([(request.prompt, request.max_tokens) for request in requests]).encode()).hexdigest()


def _trace(requests: Sequence[Request]) -> dict[str, Any]:
    return {
        "requests": len(requests),
        "groups": dict(Counter(request.group for request in requests if request.group is not None)),
        "sources": dict(Counter(request.source for request in requests if request.source is not None)),
        "kinds": dict(Counter(request.kind for request in requests)),
        "max_tokens": dict(sorted(Counter(request.max_tokens for request in requests).items())),
        "sha256": trace_digest(requests),
    }


def _server(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "url": side.target.address.root,
        "version": side.version,
        "model": without_places(side.target.model),
        "api": side.target.api.value,
        "usage": side.target.usage.value,
        "unloaded": {
            "iteration_s": side.unloaded.gap_s,
            "ttft_s": [{"computed_tokens": tokens, "ttft_s": ttft_s} for tokens, ttft_s in side.unloaded.ttft_s],
        },
    }


def _run(
    name: str,
    schedule: Schedule,
    measured: Measured,
    side: Side,
    limits: Limits | None,
    keep_text: bool,
) -> dict[str, Any]:
    closed = isinstance(schedule, ClosedLoop)
    return {
        "name": name,
        "begun": datetime.fromtimestamp(measured.begun, UTC).isoformat(timespec="seconds"),
        "clients": schedule.clients if isinstance(schedule, ClosedLoop) else None,
        "offered_per_s": None if closed else _offered(measured.run.records),
        "interrupted": measured.run.interrupted,
        "figures": asdict(figures([measured.run], measured.observed, side.unloaded, limits)),
        "requests": [_request(record, keep_text) for record in measured.run.records],
    }


def _offered(records: Sequence[Record]) -> float | None:
    """Return the rate that the arrivals came to: requests sent over when the last one was sent, from the start on."""
    last_s = max((record.sent_s for record in records), default=0.0)
    return len(records) / last_s if last_s else None


def _request(record: Record, keep_text: bool) -> dict[str, Any]:
    fields = asdict(record)
    fields["arrivals"] = [[_microseconds(arrival.at_s), arrival.tokens] for arrival in record.arrivals]
    for name in ("due_s", "sent_s", "ended_s"):
        fields[name] = _microseconds(fields[name])
    for attempt in fields["attempts"]:
        attempt["begun_s"] = _microseconds(attempt["begun_s"])
    text = fields.pop("text")
    return fields | ({"text": text} if keep_text else {"text_sha256": hashlib.sha256(text.encode()).hexdigest()})


def _microseconds(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s, 6)


def _capacity(searches: Sequence[Capacity], slos: Sequence[Slo]) -> dict[str, Any]:
    reference = searches[0]
    return {
        "limits": [asdict(slo) for slo in slos],
        "servers": [
            {
                "name": one.results.side.name,
                "tries": [
                    {"rate": a_try.rate, "run": a_try.run, "broken": {slo.name: slo.broken(a_try.seen) for slo in slos}}
                    for a_try in one.tries
                ],
                "capacity": {slo.name: _found(one, slo, reference) for slo in slos},
                "ended": one.ended,
            }
            for one in searches
        ],
    }


def _found(one: Capacity, slo: Slo, reference: Capacity) -> dict[str, float | bool | None]:
    holds, fails = one.bracket(slo)
    base, _ = reference.bracket(slo)
    ratio = holds / base if holds is not None and base else None
    return {"holds_per_s": holds, "fails_per_s": fails, "of_reference": ratio, "too_short": one.too_short(slo)}
