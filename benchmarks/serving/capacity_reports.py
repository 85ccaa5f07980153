"""Reports of `benchmarks.serving.capacity`; each says what it was measured with, so none is mistaken for another."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_hybrid_sparse.load.report import write_json

_MEASURED_WITH = "measured_with"

Json = dict[str, Any]


class OtherOptionsError(ValueError):
    """A report that was measured with other options."""


def bench(url: str, out: Path, measured_with: Mapping[str, object], *more: str) -> None:
    """Run `hybrid-sparse bench`; the report appears under its name only when it is whole."""
    part = out.with_name(f"{out.name}-unfinished")
    command = [sys.executable, "-m", "vllm_hybrid_sparse.cli.main", "bench", "--url", url, *more, "--out", str(part)]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"hybrid-sparse bench: status {done.returncode}")
    made = part.with_name(part.name + ".json")
    write_json(made, json.loads(made.read_text(encoding="utf-8")) | {_MEASURED_WITH: dict(measured_with)})
    for suffix in (".html", ".json"):
        part.with_name(part.name + suffix).rename(out.with_name(out.name + suffix))


def read_report(path: Path, measured_with: Mapping[str, object]) -> Json:
    """Return an earlier report.

    OtherOptionsError if it was measured with something other than `measured_with`, or does not say with what.
    """
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    before = found.get(_MEASURED_WITH)
    ways_out = "name another --out, or delete it to have it measured again"
    if before is None:
        raise OtherOptionsError(f"{path.name}: does not say what it was measured with: {ways_out}")
    differ = [
        f"{name}={before.get(name)}, not {value}" for name, value in measured_with.items() if before.get(name) != value
    ]
    if differ:
        raise OtherOptionsError(f"{path.name}: was measured with {'; '.join(differ)}: {ways_out}")
    return found
