"""`deploy/gpu/lease.sh`, with a Python that only prints its arguments."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu_serving, gpu_timing

SCRIPT = Path(__file__).parents[2] / "deploy" / "gpu" / "lease.sh"


def lease(out: Path, *parts: str, seconds: str = "60") -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), seconds, str(out), *parts]
    env = os.environ | {"PYTHON": "/bin/echo", "TMPDIR": str(out.parent)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def asked(out: Path, name: str) -> list[str]:
    """The arguments with which one part called Python, after `-m MODULE`."""
    with tarfile.open(out / "logs.tgz") as logs:
        said = logs.extractfile(f"logs/{name}.log")
        assert said is not None
        return said.read().decode().split()[2:]


def test_every_case_of_serving_is_in_a_part(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = lease(out, "answers", "exact")
    assert done.returncode == 0, done.stderr
    cases = [case for part in ("answers", "exact") for case in gpu_serving.parse_arguments(asked(out, part)).cases]
    assert sorted(cases) == sorted(gpu_serving.CASES)


@pytest.mark.parametrize("part", ["fits", "cut"])
def test_sides_that_are_timed_take_turns_with_all_others(part: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert lease(out, part, "answers").returncode == 0
    options = gpu_timing.parse_arguments(asked(out, part))
    assert options.overlap
    assert options.turn.name == "turn"
    assert options.side_timeout < 60, "so that what was measured is written before the time is up"
    assert {"baseline"} < set(options.sides.split(","))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("60",), "usage: lease.sh SECONDS OUT PART"), (("60", "nothing"), "lease: nothing: no such part")],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    seconds, *parts = arguments
    done = lease(tmp_path / "out", *parts, seconds=seconds)
    assert done.returncode == 2
    assert message in done.stderr
