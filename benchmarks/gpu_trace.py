"""What a GPU did in the decode steps of a trace by torch's profiler: how long it was idle, and its kernels.

    python -m benchmarks.gpu_trace TRACE.json[.gz] [--kernels 20]

The steps are those that vLLM marks as decoding the most requests and computing no prompt. The GPU is idle when no
kernel, copy or fill runs, between the beginning of the first such step on the GPU and the end of the last. Profiling
slows the host, so this is an upper limit of the idle time without it.
"""

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import markdown_table

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"execute_context_0\(0\)_generation_(\d+)\(\d+\)$")

Event = dict[str, Any]


class Busy(NamedTuple):
    """What the GPU did in some consecutive steps."""

    steps: int
    step_us: float  # mean, from the beginning of one to that of the next
    idle: float  # share of the time
    kernels: dict[str, tuple[int, float]]  # by name: how often, and microseconds, over all steps


def read_events(path: Path) -> list[Event]:
    """The events of a trace file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return events


def decode_steps(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Begin and end of each decode step on the GPU, in microseconds. ValueError if there are fewer than two."""
    by_rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and (found := _STEP.match(event["name"])):
            by_rows[int(found[1])].append((event["ts"], event["ts"] + event["dur"]))
    steps = sorted(by_rows[max(by_rows)]) if by_rows else []
    if len(steps) < 2:
        raise ValueError(f"the trace has {len(steps)} decode steps on a GPU, and must have 2 at the least")
    return steps


def busy(events: Sequence[Event]) -> Busy:
    """How the GPU spent its time in the decode steps. ValueError as from `decode_steps`."""
    steps = decode_steps(events)
    begin, end = steps[0][0], max(last for _, last in steps)
    spans, kernels = [], defaultdict(lambda: (0, 0.0))
    for event in events:
        if event.get("cat") not in _WORK:
            continue
        first, last = max(begin, event["ts"]), min(end, event["ts"] + event["dur"])
        if first < last:
            spans.append((first, last))
            count, total = kernels[event["name"]]
            kernels[event["name"]] = count + 1, total + last - first
    covered, reached = 0.0, begin
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    step_us = (steps[-1][0] - steps[0][0]) / (len(steps) - 1)
    return Busy(len(steps), step_us, 1 - covered / (end - begin), dict(kernels))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a trace says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--kernels", default=20, type=int, help="how many to list (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        found = busy(read_events(options.trace))
    except (OSError, ValueError) as error:
        print(f"gpu_trace: {options.trace.name}: {error}", file=sys.stderr)
        return 1
    print(f"{found.steps} decode steps, {found.step_us / 1e3:.2f} ms each, the GPU idle for {found.idle:.1%}\n")
    longest = sorted(found.kernels.items(), key=lambda item: -item[1][1])[: options.kernels]
    print(
        markdown_table(
            ("kernel", "a step", "µs each", "µs a step"),
            [
                (name[:60], f"{count / found.steps:.1f}", f"{total / count:.1f}", f"{total / found.steps:.0f}")
                for name, (count, total) in longest
            ],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
