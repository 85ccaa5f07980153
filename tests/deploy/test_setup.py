"""What `deploy/setup.sh` refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY


def checkout(folder: Path) -> Path:
    (folder / "deploy").mkdir(parents=True)
    for name in ("setup.sh", "versions.sh"):
        shutil.copy(DEPLOY / name, folder / "deploy" / name)
    return folder


def program(path: Path, status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {path.name} 0\nexit {status}\n")
    path.chmod(0o755)
    return path


def set_up(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "DEVICE": "cpu", **env}
    command = [str(folder / "deploy" / "setup.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def made_in(folder: Path, place: Path) -> Path:
    """Put into `folder` an environment that says it was made in `place`."""
    program(folder / ".venv" / "bin" / "python")
    (folder / ".venv" / "stamps").mkdir()
    (folder / ".venv" / "stamps" / "place").write_text(str(place))
    return folder


def test_an_environment_that_was_made_elsewhere_is_refused(tmp_path: Path) -> None:
    """Its scripts begin with the path of that place's Python."""
    folder = made_in(checkout(tmp_path / "copy"), tmp_path / "original")
    done = set_up(folder)
    assert done.returncode == 1
    assert f".venv was made in {tmp_path}/original, and this is {folder}: delete .venv and try again" in done.stderr


def test_a_link_to_a_checkout_is_no_other_place(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "checkout")
    made_in(folder, folder)
    (tmp_path / "link").symlink_to(folder)
    done = set_up(tmp_path / "link")
    assert "was made in" not in done.stderr
    assert "pyproject.toml" in done.stderr  # it is read next, and is not there


@pytest.mark.parametrize("name", ["old python", "missing"])
def test_a_python_that_is_named_is_the_only_one_tried(tmp_path: Path, name: str) -> None:
    folder = checkout(tmp_path / "checkout")
    python = tmp_path / name
    if name != "missing":
        program(python, status=1)
    done = set_up(folder, PYTHON=str(python))
    assert done.returncode == 1
    assert done.stderr == f"setup: PYTHON={python}: must be a Python of version 3.11 or newer\n"


def test_a_python_may_lie_in_a_folder_whose_name_has_a_blank(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "checkout")
    python = tmp_path / "my tools" / "python"
    program(python).write_text('#!/bin/sh\n[ "$1" != -m ]\n')
    done = set_up(folder, PYTHON=str(python))
    assert f"{python} cannot make a virtual environment" in done.stderr


def install_vllm(interpreter: str, path: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(DEPLOY / "cpu_vllm.sh"), interpreter]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False)


def test_vllm_is_installed_for_an_interpreter_that_path_knows(tmp_path: Path) -> None:
    """It is asked for its libraries, and says `python 0`."""
    program(tmp_path / "bin" / "python")
    done = install_vllm("python", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert "python 0" in done.stdout
    assert done.returncode == 0, done.stderr


def test_an_interpreter_that_is_not_there_is_named() -> None:
    done = install_vllm("no-such-python", os.environ["PATH"])
    assert done.returncode == 1
    assert done.stderr == "cpu_vllm: no-such-python: no such interpreter\n"
