"""Say how much shared memory attention takes on the GPUs that have the least, on a machine that needs no GPU.

    python -m tests.kernels.device.shared_sm86

Compiles for sm_86 what comes near the limit, without the steps that make machine code: the size is known before them.
Prints a JSON list: kernel, case, bytes. TRITON_INTERPRET must not be set.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from tests.kernels.device.compile_sm90 import compiling, launch_attention, launch_reading

TARGET = GPUTarget("cuda", 86, 32)
CASES = (
    (torch.bfloat16, 256, 64, ("_attend_kernel",)),
    (
        torch.float32,
        256,
        16,
        ("_attend_kernel", "_attend_frames_kernel", "_attend_listed_kernel", "_read_on_kernel"),
    ),
)
"""KV dtype, head_dim, query heads of a KV head, and kernels, the first form of each."""


def without_ptx(_backend: Any, _source: Any, metadata: dict[str, Any], *_options: Any) -> str:
    """Stand for the step that also names the kernel."""
    metadata["name"] = "kernel"
    return ""


def main() -> int:
    """Compile and print."""
    rows: list[dict[str, Any]] = []

    def add(name: str, kernel: Any) -> None:
        left.discard(name)
        rows.append(
            {"kernel": name, "case": case, "arch": kernel.metadata.target.arch, "bytes": kernel.metadata.shared}
        )

    with tempfile.TemporaryDirectory() as cache, compiling(add, TARGET, lambda name: name not in left):
        os.environ["TRITON_CACHE_DIR"] = cache  # what it holds are no binaries
        CUDABackend.make_ptx = without_ptx
        CUDABackend.make_cubin = lambda *_args: b""
        for dtype, head_dim, group, kernels in CASES:
            case = f"{str(dtype).removeprefix('torch.')}, head_dim {head_dim}, group {group}"
            left = set(kernels)
            launch_attention(dtype, head_dim, group)
            launch_reading(dtype, head_dim, group)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
