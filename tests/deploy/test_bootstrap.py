"""`deploy/gpu/bootstrap.sh`, with a Python that only makes files of the right names."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY

PYTHON = r"""#!/bin/bash
echo "$*" >>"$LOG"
case "$1 $2" in
  "-c import"*) touch "$4/unpacked" ;; # a part of the bundle
  "-m pip")
    while [[ $1 != --target ]]; do shift; done
    [[ ! -L $2/vllm_hybrid_sparse ]] || exit 0 # pip leaves a link as it is
    mkdir -p "$2/vllm_hybrid_sparse"
    echo "of $3" >"$2/vllm_hybrid_sparse/_native.so"
    ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "deploy" / "gpu").mkdir(parents=True)
    (folder / "vllm_hybrid_sparse").mkdir()
    for name in ("bootstrap.sh", "csrc_digest.sh"):
        shutil.copy(DEPLOY / "gpu" / name, folder / "deploy" / "gpu")
    (folder / "csrc").mkdir()
    (folder / "csrc" / "decode.cpp").write_text("one")
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def bootstrap(checkout: Path, *bundle: Path) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(checkout / "python"),
        "DEST": str(checkout.parent / "dest"),
        "LOG": str(checkout / "log"),
    }
    command = [str(checkout / "deploy" / "gpu" / "bootstrap.sh"), *map(str, bundle)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def digest(checkout: Path) -> str:
    command = f'. {DEPLOY}/gpu/csrc_digest.sh; csrc_digest "{checkout}"'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout


def native_core(checkout: Path) -> str:
    return (checkout / "vllm_hybrid_sparse" / "_native.so").read_text().strip()


def test_without_a_bundle_the_project_is_installed_from_its_sources(checkout: Path) -> None:
    done = bootstrap(checkout)
    assert done.returncode == 0, done.stderr
    assert native_core(checkout) == f"of {checkout}"
    site = checkout.parent / "dest" / "site"
    assert (site / "env.sh").is_file()
    assert (site / "vllm_hybrid_sparse").resolve() == checkout / "vllm_hybrid_sparse"


def test_a_second_run_installs_what_has_changed_since(checkout: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "site.vllm.tar.xz").touch()
    wheel = bundle / "vllm_hybrid_sparse-1-any.whl"
    wheel.touch()
    (bundle / "csrc.sha256").write_text(digest(checkout))
    done = bootstrap(checkout, bundle)
    assert done.returncode == 0, done.stderr
    assert native_core(checkout) == f"of {wheel}"
    assert (tmp_path / "dest" / "site" / "unpacked").is_file()
    (checkout / "vllm_hybrid_sparse" / "metrics.py").touch()
    again = bootstrap(checkout)
    assert again.returncode == 0, again.stderr
    assert native_core(checkout) == f"of {checkout}"
    assert (checkout / "vllm_hybrid_sparse" / "metrics.py").is_file()  # only the link went


@pytest.mark.parametrize("change", ["content", "name", "older bundle"])
def test_a_bundle_with_a_core_of_other_sources_is_refused(checkout: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "site.vllm.tar.xz").touch()
    (tmp_path / "vllm_hybrid_sparse-1-any.whl").touch()
    if change != "older bundle":
        (tmp_path / "csrc.sha256").write_text(digest(checkout))
    source = checkout / "csrc" / "decode.cpp"
    if change == "content":
        source.write_text("two")
    elif change == "name":
        source.rename(source.with_name("encode.cpp"))
    done = bootstrap(checkout, tmp_path)
    assert done.returncode == 1
    assert "its native core is not of this checkout's csrc; make the bundle again" in done.stderr
    assert not (checkout / "vllm_hybrid_sparse" / "_native.so").exists()


def test_a_bundle_without_parts_is_refused(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "csrc.sha256").write_text(digest(checkout))
    done = bootstrap(checkout, tmp_path)
    assert done.returncode == 1
    assert "holds no site*.tar.xz" in done.stderr
