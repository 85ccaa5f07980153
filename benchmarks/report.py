"""How results are summed up, shown and kept."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import provenance

RESULTS = Path(__file__).resolve().parent / "results"

provenance()  # taken when the program begins, before the program itself loads the machine


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile and the number of values; NaN (`save`: null) if there is none."""
    if not values:
        return {"p20": float("nan"), "p50": float("nan"), "p80": float("nan"), "values": 0}
    if len(values) == 1:
        return {"p20": values[0], "p50": values[0], "p80": values[0], "values": 1}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"p20": fifths[0], "p50": statistics.median(values), "p80": fifths[3], "values": len(values)}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with columns padded to the same width."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def save(name: str, content: dict[str, object], path: Path | None = None) -> Path:
    """Write `content` with its provenance to a new JSON file in `benchmarks/results/` and return the path.

    NaN and infinite numbers are written as null.

    path   what an earlier call of the same measurement returned: that file is rewritten
    """
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    text = json.dumps(_finite(provenance() | content), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _finite(value: object) -> object:
    """Return the value with null for every number that JSON does not have, rather than lose a measurement to one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
