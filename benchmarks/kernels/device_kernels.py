"""How close the device's kernels come to what the machine's memory and its link to the host allow.

    python -m benchmarks.kernels.device_kernels [--out FILE] [--pool-gib 8]

First the ceilings are measured: a copy on the device (bytes read and written), copies from and to pinned host memory,
and the host's own read bandwidth. Then each kernel is checked and timed on a layer shaped like Llama-3.1-8B's: its
bytes over its median time, next to the ceiling that bounds it. Exits with 1 if a kernel is wrong; a wrong one has no
figures.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from triton.testing import do_bench

from benchmarks.kernels.device_cases import TOLERANCE, Case, Machine, all_cases, make_machine
from benchmarks.kernels.ranked_cases import ranked_cases
from benchmarks.machine import provenance
from benchmarks.report import markdown_table, save
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import make_thread_pool

ROWS = (1, 4, 32)
CONTEXT_PAGES = (2048, 8192)  # of 32K and 128K tokens
MICROBATCHES = (8, 32, 128)
_COPY_BYTES = 2**30


def time_us(run: Callable[[], object]) -> dict[str, float]:
    """Percentiles of the time of a call between two events on the device, its launches included."""
    low, middle, high = do_bench(run, quantiles=[0.2, 0.5, 0.8])
    return {"p20": low * 1e3, "p50": middle * 1e3, "p80": high * 1e3}


def measure_ceilings(machine: Machine) -> dict[str, float]:
    """The ceilings that bound the kernels, in bytes a second."""
    size = min(_COPY_BYTES, machine.host.numel() * machine.host.element_size() // 2)
    host = machine.host.view(torch.uint8)[:size]
    source, target = torch.empty(2, size, dtype=torch.uint8, device=machine.device)
    source.random_()
    threads = len(os.sched_getaffinity(0))
    pool = make_thread_pool(threads, helpers="own")
    host_rates = sorted(
        _native.read_bandwidth(pool, host.data_ptr(), size, piece=machine.page_bytes, shuffled=False) for _ in range(5)
    )
    return {
        "device": 2 * size / time_us(lambda: target.copy_(source))["p50"] * 1e6,
        "from_host": size / time_us(lambda: target.copy_(host, non_blocking=True))["p50"] * 1e6,
        "to_host": size / time_us(lambda: host.copy_(target, non_blocking=True))["p50"] * 1e6,
        "host_read": host_rates[len(host_rates) // 2],
    }


def measure(case: Case, ceilings: dict[str, float]) -> dict[str, object]:
    """Check a case, then time it; a wrong one is not timed."""
    error = case.error()
    row: dict[str, object] = {"kernel": case.name, "size": case.size, "bytes": case.moved_bytes, "error": error}
    if not error < TOLERANCE:
        return row | {"passed": False}
    time = time_us(case.run)
    rate = case.moved_bytes / time["p50"] * 1e6
    return row | {
        "passed": True,
        "time_us": time,
        "bytes_per_s": rate,
        "ceiling": case.ceiling,
        "share_of_ceiling": rate / ceilings[case.ceiling],
    }


def table(rows: list[dict[str, object]]) -> str:
    """One line per case."""
    lines = []
    for row in rows:
        time, rate, share = row.get("time_us"), row.get("bytes_per_s"), row.get("share_of_ceiling")
        if isinstance(time, dict) and isinstance(rate, float) and isinstance(share, float):
            figures = (f"{time['p50']:.1f} ({time['p20']:.1f}–{time['p80']:.1f})", f"{rate / 1e9:.0f}", f"{share:.0%}")
        else:
            figures = ("WRONG", "", "")
        lines.append((str(row["kernel"]), str(row["size"]), *figures, str(row.get("ceiling", ""))))
    return markdown_table(("kernel", "size", "µs p50 (p20–p80)", "GB/s", "share", "of"), lines)


def main() -> int:
    """Measure, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the result; by default a new one in benchmarks/results")
    parser.add_argument("--pool-gib", type=float, default=8.0, help="of the pool, and of pinned host memory")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("device_kernels: needs an NVIDIA GPU, and torch finds none", file=sys.stderr)
        return 2
    machine = make_machine(
        torch.device("cuda", 0),
        pool_bytes=int(options.pool_gib * 2**30),
        dtype=torch.bfloat16,
        kv_heads=8,
        group=4,
        head_dim=128,
    )
    ceilings = measure_ceilings(machine)
    rows = []
    cases = all_cases(machine, rows=ROWS, context_pages=CONTEXT_PAGES, microbatches=MICROBATCHES)
    ranked = (
        case for count in ROWS for pages in CONTEXT_PAGES for case in ranked_cases(machine, count, pages, pages // 20)
    )
    for case in chain(cases, ranked):
        rows.append(measure(case, ceilings))
        print(rows[-1], file=sys.stderr, flush=True)
    gpu = torch.cuda.get_device_properties(0)
    content = {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "torch": torch.__version__,
        "ceilings_bytes_per_s": ceilings,
        "shape": {"dtype": "bf16", "kv_heads": machine.kv_heads, "group": machine.group, "head_dim": machine.head_dim},
        "rows": rows,
    }
    if options.out is None:
        print(f"kept in {save('device_kernels', content)}", file=sys.stderr)
    else:
        options.out.write_text(json.dumps(provenance() | content, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    print("\nceilings: " + ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in ceilings.items()))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
