"""Where the deployment's files are, and the tools that check them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "vllm-hybrid-sparse"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "hybrid-sparse.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
COMPOSE = DEPLOY / "compose.yaml"
DOCKERFILES = [DEPLOY / "Dockerfile.cpu", DEPLOY / "Dockerfile.cuda"]


def load_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_dashboard() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return dashboard


def tool(name: str, package: str) -> str:
    """Path of a program next to this Python or on PATH; skips the test if there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (package {package})")
    return found


def run_tool(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a checker and return what it printed. Fails the test if its status is not 0."""
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def refuse_unknown_options(serve_args: list[str]) -> Any:
    """Parse arguments with vLLM's own parser of `vllm serve`; fails the test if it refuses one."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    try:
        return make_arg_parser(FlexibleArgumentParser()).parse_args(serve_args)
    except SystemExit:
        pytest.fail(f"vllm serve refuses {serve_args}")
