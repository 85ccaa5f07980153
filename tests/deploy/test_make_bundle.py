"""`deploy/gpu/make_bundle.sh`, with small programs that only leave files of the right names."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY

VERSION = next(
    line.partition("=")[2]
    for line in (DEPLOY / "versions.sh").read_text(encoding="utf-8").splitlines()
    if line.startswith("VLLM_VERSION=")
)

PROGRAMS = {
    "python": r"""#!/bin/bash
echo "$*" >>"$LOG"
case "$1 $3 $5" in
  "-c "*) exit 0 ;;
  "-m download "*) exit 0 ;; # the wheels are there
  "-m install "*) while [[ $1 != --target ]]; do shift; done; mkdir -p "$2" ;;
  "-m wheel "*) exit 0 ;;
  *) cp "$2" "$3" ;; # thin_fatbin.py
esac
""",
    "unzip": r"""#!/bin/bash
while [[ $1 != -d ]]; do shift; done
mkdir -p "$2/flashinfer/data/csrc" "$2/flashinfer_python-0.dist-info"
touch "$2"/{_C_stable_libtorch.abi3.so,_moe_C_stable_libtorch.abi3.so,_vllm_fa3_C.abi3.so}
""",
    "tar": r"""#!/bin/bash
[[ $2 != */"$BROKEN" ]] || { echo "tar: $2: broken" >&2; exit 2; }
echo "$2"
""",
    "xz": "#!/bin/sh\nexec cat\n",
}


def make_bundle(folder: Path, broken: str) -> subprocess.CompletedProcess[str]:
    bin_, work = folder / "bin", folder / "work"
    pins = hashlib.sha256((DEPLOY / "gpu" / "pins.txt").read_bytes()).hexdigest()[:12]
    wheels = work / f"wheels-{pins}"
    for path in (bin_, work / "big", wheels):
        path.mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (work / "big" / f"vllm-{VERSION}-any.whl").touch()
    (work / "big" / "flashinfer_python-0-any.whl").touch()
    (wheels / ".done").touch()
    (work / "cascade-0.so").touch()
    env = {
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "PY312": str(bin_ / "python"),
        "WORK": str(work),
        "FLASHINFER_VERSION": "0",
        "LOG": str(folder / "log"),
        "BROKEN": broken,
    }
    command = [str(DEPLOY / "gpu" / "make_bundle.sh"), str(folder / "out")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_bundle_is_of_the_version_that_is_installed_elsewhere(tmp_path: Path) -> None:
    done = make_bundle(tmp_path, broken="none")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out" / "main").iterdir()} == {
        "site.c.tar.xz", "site.vllm.tar.xz", "site.deps.tar.xz", "site_fi.flashinfer.tar.xz", "site.fa3.tar.xz",
        "csrc.sha256",
    }  # fmt: skip
    assert "download" not in (tmp_path / "log").read_text()  # the wheels of these versions are there
    text = (DEPLOY / "gpu" / "make_bundle.sh").read_text(encoding="utf-8")
    assert VERSION not in text


@pytest.mark.parametrize("part", ["c", "core", "deps", "fi", "fa3", "moe", "cfat"])
def test_a_part_that_cannot_be_packed_makes_no_bundle(tmp_path: Path, part: str) -> None:
    done = make_bundle(tmp_path, broken=part)
    assert done.returncode != 0
    assert f"/{part}: broken" in done.stderr
