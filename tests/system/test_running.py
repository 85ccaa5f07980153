"""A running server under bad input: it answers with a clear error or lets go, and goes on."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from tests.system.completions import Answer, complete, hang_up, metric, post
from tests.system.test_families import byte_prompts
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server, core_list

LIMIT_TOKENS = 1600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model served with `topk`, set the other way the command line offers."""
    folder = tmp_path_factory.mktemp("running")
    args = [
        *stock_args("float32", LIMIT_TOKENS, kv_cache_bytes=64 << 20),
        "--attention-backend=hybrid_sparse",
        "--additional-config.hybrid_sparse.policy=topk",
        "--additional-config.hybrid_sparse.topk_ratio=0.05",
        "--enforce-eager",
    ]
    bound = {**server_env(), "VLLM_CPU_OMP_THREADS_BIND": core_list()}
    with Server(make_tiny_model("llama-gqa", folder), args, bound, folder / "server.log") as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


@pytest.fixture(scope="module")
def before(server: Server) -> list[Answer]:
    """Answers given before anything bad happened."""
    return complete(server, byte_prompts(seed=7), max_tokens=8, concurrency=4)


def assert_goes_on(server: Server, before: list[Answer]) -> None:
    """The server answers as before, and holds no block when nobody asks."""
    assert complete(server, byte_prompts(seed=7), max_tokens=8, concurrency=4) == before
    deadline = time.monotonic() + 20
    while metric(server, "vllm:kv_cache_usage_perc") > 0 or metric(server, "vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline, "blocks or requests are still held 20 s after the last request"
        time.sleep(0.2)


def test_effective_settings_are_logged_once(server: Server) -> None:
    """The log says which settings are in effect, defaults included."""
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in log.splitlines() if "topk_ratio=0.05" in line and "sink_tokens=64" in line]
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param({"prompt": [7] * (LIMIT_TOKENS + 1), "max_tokens": 1}, "1600", id="prompt-beyond-limit"),
        pytest.param({"prompt": [10_000], "max_tokens": 1}, "(?i)vocab", id="token-beyond-vocabulary"),
        pytest.param({"prompt": [], "max_tokens": 1}, "(?i)prompt", id="empty-prompt"),
        pytest.param({"prompt": [7], "max_tokens": -1}, "max_tokens", id="negative-answer"),
    ],
)
def test_impossible_request_gets_status_400(
    server: Server, before: list[Answer], request_: dict[str, object], expected: str
) -> None:
    """The client learns what was wrong; nobody else notices."""
    status, body = post(server, {"model": server.model, "temperature": 0, **request_})
    assert status == 400, body
    assert json.loads(body)["error"]["message"]
    assert re.search(expected, body), body
    assert_goes_on(server, before)


def test_answer_ends_at_the_limit(server: Server, before: list[Answer]) -> None:
    """vLLM cuts an answer that would pass the limit: its last token stands at the very last position."""
    request = {"model": server.model, "prompt": [7] * 1500, "max_tokens": 101, "temperature": 0, "ignore_eos": True}
    status, body = post(server, request)
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == LIMIT_TOKENS - 1500
    assert_goes_on(server, before)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_hang_up_releases_everything(server: Server, before: list[Answer], after: int) -> None:
    """Clients that leave while their prompt is computed, at the first token, and while decoding."""
    for prompt in byte_prompts(seed=8)[-4:]:
        hang_up(server, prompt[:1000], after)
    assert_goes_on(server, before)
