"""Renders the Helm chart for tests, with Helm's own library."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from tests.deploy.files import CHART, ROOT

KUBERNETES = "1.31.0"
CLAIM = {"claim": "models"}  # without it the chart refuses to render
RELEASE = "chat"


def helm(action: str, values: Mapping[str, Any], release: str = RELEASE) -> Any:
    """What Helm's library answers; see helm_child."""
    return json.loads(_answer(action, json.dumps(values), release))


@cache
def _answer(action: str, values: str, release: str) -> str:
    command = [sys.executable, "-m", "tests.deploy.helm_child", action, str(CHART), release]
    done = subprocess.run(command, input=values, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: Mapping[str, Any], release: str = RELEASE) -> dict[str, Any]:
    """The chart's objects by kind, with a claim for the model if the values give no model."""
    answer = helm("render", {"model": CLAIM} | dict(values), release)
    texts = [text for name, text in answer.items() if "NOTES" not in name]
    objects = [found for text in texts for found in yaml.safe_load_all(text) if found]
    return {found["kind"]: found for found in objects}


def pod(objects: Mapping[str, Any]) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


def container(objects: Mapping[str, Any]) -> Any:
    (only,) = pod(objects)["containers"]
    return only


def variables(objects: Mapping[str, Any]) -> dict[str, str]:
    """The container's environment; empty texts for values that come from elsewhere."""
    return {entry["name"]: entry.get("value", "") for entry in container(objects)["env"]}
