"""The device's kernels compile for the GPU that they are written for, on a machine without one."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

KERNELS = {
    "_attend_frames_kernel",
    "_attend_kernel",
    "_attend_listed_kernel",
    "_clear_runs_kernel",
    "_encode_kernel",
    "_forget_kernel",
    "_group_kernel",
    "_look_up_kernel",
    "_merge_kernel",
    "_merge_splits_kernel",
    "_merge_with_unread_kernel",
    "_move_pages_kernel",
    "_plan_kernel",
    "_publish_kernel",
    "_read_on_kernel",
    "_refill_kernel",
    "_rotate_kernel",
    "_score_codes_kernel",
    "_score_kernel",
    "_store_tokens_kernel",
    "_summarize_kernel",
    "_verify_kernel",
    "_withdraw_kernel",
}
OF_TWO_FORMS = {
    "_attend_kernel",  # with the tokens' scores
    "_look_up_kernel",  # by an order
    "_merge_splits_kernel",  # with their log-sum-exp
    "_move_pages_kernel",  # to the host
    "_store_tokens_kernel",  # in frames, too
    "_verify_kernel",  # by an estimate
}
SHARED_BYTES_OF_SM90 = 227 * 1024  # that one program may have
SHARED_BYTES_OF_SM86 = 99 * 1024  # likewise, and on sm_89 and sm_120
STACK_BYTES = {"_attend_kernel": 16, "_attend_listed_kernel": 48, "_read_on_kernel": 192}
"""Of a thread in half precision at head_dim 256, where registers do not suffice; everywhere else they do."""


def compiler_of_triton() -> Path:
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"


def kernels_of_the_package() -> set[str]:
    """Every kernel that a file of the package defines; what kernels call is named otherwise."""
    package = Path(__file__).parents[3] / "vllm_hybrid_sparse"
    names = set()
    for path in package.glob("kernels/*/gpu.py"):
        text = path.read_text(encoding="utf-8")
        names |= set(re.findall(r"^@triton\.jit(?:\([^)]*\))?.*\ndef (\w+_kernel)\(", text, re.MULTILINE))
    return names


def test_the_list_of_kernels_is_whole() -> None:
    assert kernels_of_the_package() == KERNELS


def compiled(script: str, cache: Path, *arguments: str) -> Any:
    """What a script beside this file prints, in a process whose kernels are not interpreted."""
    if not compiler_of_triton().exists():
        pytest.skip("this build of Triton brings no ptxas")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.device.{script}", *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_kernel_compiles_for_sm_90_and_in_half_precision_keeps_to_its_registers(
    tmp_path: Path, *, few: bool
) -> None:
    rows = compiled("compile_sm90", tmp_path, *(["--few"] if few else []))
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert row["arch"] == 90
        assert row["shared_bytes"] <= SHARED_BYTES_OF_SM90, row
        if not row["case"].startswith("float32"):  # whose attention at head_dim 256 needs 6.7 kB of stack a thread
            allowed = STACK_BYTES.get(row["kernel"], 0) if "head_dim 256" in row["case"] else 0
            assert row["local_bytes"] == 0, row
            assert row["stack_bytes"] <= allowed, row


def test_no_kernel_is_compiled_anew_for_numbers_that_change_from_step_to_step(tmp_path: Path) -> None:
    expected = {kernel: 2 if kernel in OF_TWO_FORMS else 1 for kernel in KERNELS}
    assert compiled("binaries_sm90", tmp_path) == expected


def test_attention_fits_the_gpus_with_the_least_shared_memory(tmp_path: Path) -> None:
    rows = compiled("shared_sm86", tmp_path)
    assert [row["kernel"] for row in rows] == [
        "_attend_kernel",
        *("_attend_kernel", "_attend_frames_kernel", "_attend_listed_kernel", "_read_on_kernel"),
    ]
    for row in rows:
        assert row["arch"] == 86
        assert row["bytes"] <= SHARED_BYTES_OF_SM86, row
