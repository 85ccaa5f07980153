"""A server under what happens to servers: told to stop, overrun, its worker killed, supervised and not."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.system.completions import complete, metric
from tests.system.test_families import byte_prompts
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server, _status

ARGS = [
    *stock_args("float32", 2048, 64 << 20),
    *our_args(policy="topk", topk_pages=4),
    "--enforce-eager",
    "--max-num-seqs=8",
]
SUPERVISE = Path(__file__).parents[2] / "deploy" / "supervise.sh"
DRAIN_S = 60
ENDS_WITHIN_S = 60.0
SILENT_S = 15.0  # how long a client waits for the next token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that all servers here serve."""
    return make_tiny_model("llama-gqa", tmp_path_factory.mktemp("model"))


def served(model: Path, tmp_path: Path, *more: str) -> Server:
    return Server(model, [*ARGS, *more], server_env(), tmp_path / "server.log")


def exit_status(server: Server) -> int:
    """The status with which the server ends by itself; fails if it goes on. It is not reaped: `stop` ends its group."""
    process = server._process
    assert process is not None
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while (status := _status(process.pid)) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return status


async def stream(server: Server, tokens: int, begun: asyncio.Event) -> tuple[int, str]:
    """Stream one answer; return how many tokens came and why it ended (empty: it broke off).

    Tokens are counted, not chunks: if its API server is late, vLLM sends all tokens it has in one chunk. The client
    waits at most SILENT_S for a token: vLLM may leave a connection open although it has ended the engine.
    """
    payload = {
        "model": server.model,
        "prompt": [7] * 300,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    came, reason = 0, ""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120, sock_read=SILENT_S)) as session,
            session.post(f"{server.base_url}/completions", json=payload) as reply,
        ):
            async for line in reply.content:
                if line.startswith(b"data: {") and b'"choices"' in line:
                    (choice,) = json.loads(line[6:])["choices"]
                    came, reason = came + len(choice["token_ids"]), choice["finish_reason"] or reason
                    begun.set()
    except (aiohttp.ClientError, TimeoutError):
        pass
    begun.set()
    return came, reason


def interrupted(
    server: Server, tokens: int, interrupt: Callable[[], None], within_s: float | None = None
) -> tuple[int, str]:
    """Begin a stream, interrupt the server at its first token, and return what came of the stream."""

    async def run() -> tuple[int, str]:
        begun = asyncio.Event()
        streamed = asyncio.create_task(stream(server, tokens, begun))
        await begun.wait()
        interrupt()
        return await asyncio.wait_for(streamed, within_s)

    return asyncio.run(run())


def terminate(server: Server) -> None:
    """Tell the server's first process to stop, as a supervisor does."""
    assert server._process is not None
    server._process.send_signal(signal.SIGTERM)


def test_told_to_stop_it_ends_running_answers_first(model: Path, tmp_path: Path) -> None:
    """The images run with --shutdown-timeout: nothing that was begun is lost, and the status is 0."""
    with served(model, tmp_path, f"--shutdown-timeout={DRAIN_S}") as server:
        server.wait_ready(START_TIMEOUT_S)
        assert interrupted(server, 400, lambda: terminate(server)) == (400, "length")
        assert exit_status(server) == 0
    assert "draining in-flight requests" in server.log_tail(200)


def workers_of(server: Server) -> list[int]:
    """Process ids of the server's workers."""
    assert server._process is not None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = int((folder / "stat").read_text().rpartition(")")[2].split()[2])
            name = (folder / "cmdline").read_text().partition("\0")[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if group == server._process.pid and "Worker" in name:
            found.append(int(folder.name))
    return found


class Supervised(Server):
    """A server that deploy/supervise.sh runs."""

    @property
    def command(self) -> list[str]:
        """The script before the server's own command."""
        return [str(SUPERVISE), *super().command]


def test_a_killed_worker_ends_the_server_and_the_supervised_one_answers_as_before(model: Path, tmp_path: Path) -> None:
    """The server ends instead of staying up and answering nobody, and its supervisor starts it again.

    vLLM's status is 0 even then, so a supervisor must restart it whatever the status: Compose and the chart do.
    """
    with Supervised(model, ARGS, server_env(), tmp_path / "server.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        prompts = byte_prompts(seed=6)[-4:]
        before = complete(server, prompts, max_tokens=8, concurrency=1)
        (worker,) = workers_of(server)
        came, reason = interrupted(server, 1500, lambda: os.kill(worker, signal.SIGKILL), within_s=ENDS_WITHIN_S)
        assert 0 < came < 1500
        assert reason != "length"
        ended_by_s = time.monotonic() + ENDS_WITHIN_S
        while "supervise: the server ended with status 0" not in (log := server.log_tail(400)):
            assert time.monotonic() < ended_by_s, f"the server did not end:\n{log}"
            time.sleep(0.5)
        assert "died" in log
        end_s = time.monotonic() + START_TIMEOUT_S
        while workers_of(server) in ([], [worker]) and time.monotonic() < end_s:
            time.sleep(0.5)
        server.wait_ready(START_TIMEOUT_S)
        assert workers_of(server) != [worker]
        assert complete(server, prompts, max_tokens=8, concurrency=4) == before


def statuses(server: Server, requests: int) -> list[int]:
    """HTTP statuses of `requests` requests that are sent at the same time."""

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        payload = {"model": server.model, "prompt": [number % 256] * 400, "max_tokens": 16, "temperature": 0}
        async with session.post(f"{server.base_url}/completions", json=payload) as reply:
            await reply.read()
            return reply.status

    async def run() -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return list(await asyncio.gather(*(one(session, number) for number in range(requests))))

    return asyncio.run(run())


def test_overrun_it_turns_the_excess_away_and_told_to_stop_without_a_time_it_breaks_off(
    model: Path, tmp_path: Path
) -> None:
    with served(model, tmp_path, "--max-num-queued-reqs=12") as server:
        server.wait_ready(START_TIMEOUT_S)
        prompts = byte_prompts(seed=5)[-6:]
        before = complete(server, prompts, max_tokens=8, concurrency=1)
        seen = statuses(server, 60)
        assert set(seen) == {200, 503}
        assert seen.count(200) >= 12
        assert metric(server, "vllm:admission_rejections_total") == seen.count(503)
        assert complete(server, prompts, max_tokens=8, concurrency=6) == before
        begun_s = time.monotonic()
        came, _reason = interrupted(server, 1500, lambda: terminate(server))
        assert 0 < came < 1500
        assert exit_status(server) == 0
        assert time.monotonic() - begun_s < SILENT_S + 30
