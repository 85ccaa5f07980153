"""compose.yaml: Compose can read it, its files exist, and vLLM knows its server's arguments."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.files import COMPOSE, DEPLOY, load_yaml, refuse_unknown_options, run_tool, tool

ENVIRONMENT = {"MODEL": "/models/tiny"}


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda found: ENVIRONMENT.get(found[1], found[2] or ""), text)


def read_by_compose(**environment: str) -> Any:
    compose = tool("docker-compose", "Debian's docker-compose")
    env = {"PATH": os.environ["PATH"]} | environment
    return yaml.safe_load(run_tool(compose, "-f", COMPOSE, "config", env=env))["services"]


def test_compose_reads_it() -> None:
    assert set(read_by_compose(**ENVIRONMENT)) == {"vllm", "prometheus", "grafana"}


def test_commands_that_start_nothing_need_no_variables() -> None:
    """Every command reads the whole file first, so a variable that is required would stop `ps` and `down` too."""
    assert ":?" not in re.sub(r"#.*", "", COMPOSE.read_text(encoding="utf-8"))
    assert set(read_by_compose()) == {"vllm", "prometheus", "grafana"}


def test_without_a_model_no_server_starts() -> None:
    """Docker makes an empty folder for a source that is missing, unless that is impossible."""
    (model,) = [mount for mount in load_yaml(COMPOSE)["services"]["vllm"]["volumes"] if "/model" in mount]
    assert with_defaults(model) == "/models/tiny:/model:ro"
    source = model.replace("${MODEL:-", "").partition("}")[0]
    assert "MODEL" in source
    with pytest.raises(NotADirectoryError):
        Path(source).mkdir(parents=True)


def test_what_it_mounts_is_there() -> None:
    mounts = [mount for service in load_yaml(COMPOSE)["services"].values() for mount in service["volumes"]]
    own = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(own) == 4
    assert all((DEPLOY / path).exists() for path in own)


def test_vllm_knows_the_arguments() -> None:
    service = load_yaml(COMPOSE)["services"]["vllm"]
    options = refuse_unknown_options([with_defaults(argument) for argument in service["command"]])
    assert options.kv_cache_memory_bytes == 4 * 2**30
    assert options.additional_config == {"hybrid_sparse": {"policy": "progressive"}}
    assert options.max_num_queued_reqs == 64
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > options.shutdown_timeout > 0


def test_nothing_listens_beyond_this_machine_unless_told() -> None:
    ports = [port for service in load_yaml(COMPOSE)["services"].values() for port in service["ports"]]
    assert all(with_defaults(port).startswith("127.0.0.1:") for port in ports)


def test_whatever_ends_is_started_again() -> None:
    """vLLM ends with status 0 when its worker dies, so `on-failure` would leave it dead."""
    assert {service["restart"] for service in load_yaml(COMPOSE)["services"].values()} == {"unless-stopped"}
