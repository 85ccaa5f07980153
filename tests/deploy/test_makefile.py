"""`make test` and `make test-all`, with a pytest that only returns a status."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import ROOT, tool

FAKE = """#!/bin/sh
case "$*" in
  *"not system"*) echo unit; exit "$UNIT" ;;
  *"slow and not gpu"*) echo slow; exit "$SLOW" ;;
  *) echo system; exit "$SYSTEM" ;;
esac
"""


def make_test(
    folder: Path, args: str, unit: int, system: int, *, target: str = "test", slow: int = 0
) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    env = {
        "PATH": os.environ["PATH"],
        "UNIT": str(unit),
        "SYSTEM": str(system),
        "SLOW": str(slow),
    }  # nothing that an outer `make` exports
    command = [tool("make", "make"), "-s", "-o", "setup", target, f"PYTHON_BIN={python}", f"ARGS={args}"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("unit", "system"), [(0, 0), (5, 0), (0, 5)])
def test_what_is_chosen_may_lie_in_one_half(tmp_path: Path, unit: int, system: int) -> None:
    done = make_test(tmp_path, "-k 'one name'", unit, system)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["test: unit tests", "unit", "test: system tests", "system"]


@pytest.mark.parametrize(("unit", "system"), [(5, 5), (1, 0), (0, 1), (5, 1), (4, 4)])
def test_a_choice_of_nothing_and_a_failure_fail(tmp_path: Path, unit: int, system: int) -> None:
    assert make_test(tmp_path, "-k name", unit, system).returncode != 0


@pytest.mark.parametrize(("unit", "system"), [(5, 0), (0, 5), (1, 0), (0, 1)])
def test_without_a_choice_neither_half_may_be_empty(tmp_path: Path, unit: int, system: int) -> None:
    done = make_test(tmp_path, "", unit, system)
    assert done.returncode != 0
    assert ("system" in done.stdout.split("\n")) is (unit == 0)


@pytest.mark.parametrize(("slow", "args"), [(0, ""), (0, "-k name"), (5, "-k name")])
def test_all_is_the_same_and_then_what_is_slow(tmp_path: Path, slow: int, args: str) -> None:
    done = make_test(tmp_path, args, 0, 0, target="test-all", slow=slow)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:-1] == ["test-all: slow tests", "slow"]
    assert done.stdout.split("\n")[:4] == ["test: unit tests", "unit", "test: system tests", "system"]


@pytest.mark.parametrize(("system", "slow", "args"), [(0, 1, ""), (0, 5, ""), (0, 1, "-k name"), (1, 0, "")])
def test_all_fails_with_what_is_slow_and_with_what_is_not(tmp_path: Path, system: int, slow: int, args: str) -> None:
    done = make_test(tmp_path, args, 0, system, target="test-all", slow=slow)
    assert done.returncode != 0
    assert ("slow" in done.stdout.split("\n")) is (system == 0)
