"""compose.yaml: Compose can read it, its files exist, and vLLM knows its server's arguments."""

import os
import re

import yaml

from tests.deploy.files import COMPOSE, DEPLOY, load_yaml, refuse_unknown_options, run_tool, tool

ENVIRONMENT = {"MODEL": "/models/tiny", "PATH": os.environ["PATH"]}


def with_defaults(text: str) -> str:
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda found: ENVIRONMENT.get(found[1], found[2] or ""), text)


def test_compose_reads_it() -> None:
    out = run_tool(tool("docker-compose", "Debian's docker-compose"), "-f", COMPOSE, "config", env=ENVIRONMENT)
    assert set(yaml.safe_load(out)["services"]) == {"vllm", "prometheus", "grafana"}


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
