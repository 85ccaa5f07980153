"""Starting, waiting for and stopping a server, on stand-ins for `vllm serve`."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_hybrid_sparse.cli import server as server_module
from vllm_hybrid_sparse.cli.server import Server, ServerError, core_list, free_port

HEALTHY = """
    import http.server, os, sys
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    print("value of SHOWN:", os.environ.get("SHOWN"), flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
STUBBORN_CHILD = """
    import signal, subprocess, sys, time
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    print("child", subprocess.Popen([sys.executable, "-c", child]).pid, flush=True)
    time.sleep(600)
"""
ENDS_AT_ONCE = """
    print("no such model", flush=True)
    raise SystemExit(3)
"""
KILLED = """
    import os
    os.kill(os.getpid(), 9)
"""
FAILS_INSIDE = """
    print("(Worker pid=7) ERROR 11-22 22:16:08 [core.py:9] Traceback (most recent call last):")
    for _ in range(2):
        print("(Worker pid=7) ERROR 11-22 22:16:08 [core.py:9] vllm_hybrid_sparse.errors.ConfigError: size=7: too much")
    print("INFO: 0 errors so far")
    for line in range(100):
        print("  File", line)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    raise SystemExit(1)
"""
SILENT = """
    import time
    time.sleep(600)
"""


HALF_A_CHARACTER = """
    import time
    with open("/proc/self/comm", "wb") as name:
        name.write("имя".encode()[:5])  # as the kernel cuts a name that is too long
    print("named", flush=True)
    time.sleep(600)
"""


class StandIn(Server):
    """A server whose process is a small Python script."""

    def __init__(self, script: str, log_path: Path) -> None:
        super().__init__("model", [], {"SHOWN": "yes"}, log_path)
        self._script = textwrap.dedent(script)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self._script, str(self.port)]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for_log(server: Server, text: str) -> str:
    """The server's log once it holds `text`."""
    deadline = time.monotonic() + 30
    while text not in (log := server.log_tail()):
        assert time.monotonic() < deadline, log
        time.sleep(0.05)
    return log


def test_ready_server_answers_and_has_the_environment(tmp_path: Path) -> None:
    with StandIn(HEALTHY, tmp_path / "logs" / "server.log") as server:
        assert server.wait_ready(30) >= 0
        assert server.running()
        assert "value of SHOWN: yes" in server.log_tail()
        assert server.base_url == f"http://127.0.0.1:{server.port}/v1"
    assert not server.running()


def test_a_proxy_is_not_asked_for_a_server_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with StandIn(HEALTHY, tmp_path / "log") as server:
        server.wait_ready(30)


def test_early_end_is_an_error_with_status_and_log(tmp_path: Path) -> None:
    with StandIn(ENDS_AT_ONCE, tmp_path / "server.log") as server, pytest.raises(ServerError) as caught:
        server.wait_ready(30)
    assert "status 3" in str(caught.value)
    assert "no such model" in str(caught.value)


def test_early_end_by_a_signal_says_which(tmp_path: Path) -> None:
    with StandIn(KILLED, tmp_path / "server.log") as server, pytest.raises(ServerError, match="ended with status -9 "):
        server.wait_ready(30)


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A port of the loopback address where every question gets these bytes, and the connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # it was shut down
                with connection:
                    connection.recv(4096)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", b"SSH-2.0-other\r\n", b""],
    ids=["cut", "other", "none"],
)
def test_metrics_that_are_cut_off_or_no_http_are_an_error(reply: bytes, tmp_path: Path) -> None:
    with answering(reply) as port:
        server = Server("model", [], {}, tmp_path / "absent.log", port=port)
        with pytest.raises(ServerError, match="/metrics does not answer"):
            server.metrics()


def test_a_port_that_something_else_has_is_no_healthy_server(tmp_path: Path) -> None:
    with answering(b"SSH-2.0-other\r\n") as port:
        assert not Server("model", [], {}, tmp_path / "absent.log", port=port)._healthy()


def test_the_first_errors_are_named_though_the_log_goes_on_for_long(tmp_path: Path) -> None:
    with StandIn(FAILS_INSIDE, tmp_path / "server.log") as server, pytest.raises(ServerError) as caught:
        server.wait_ready(30)
    assert "size=7" not in server.log_tail()
    assert str(caught.value).splitlines()[:4] == [
        f"server on port {server.port}: ended with status 1 before it was ready; the first errors:",
        "  vllm_hybrid_sparse.errors.ConfigError: size=7: too much",
        "  RuntimeError: Engine core initialization failed. See root cause above.",
        f"the end of {server.log_path}:",
    ]


def test_silence_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    with StandIn(SILENT, tmp_path / "server.log") as server, pytest.raises(ServerError, match="not ready after 1 s"):
        server.wait_ready(1)


def test_waiting_without_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="not started"):
        StandIn(SILENT, tmp_path / "server.log").wait_ready(1)


def test_second_start_is_an_error(tmp_path: Path) -> None:
    with StandIn(SILENT, tmp_path / "server.log") as server, pytest.raises(ServerError, match="started twice"):
        server.start()


def test_stop_kills_what_is_deaf_in_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_GRACE_S", 1.0)
    with StandIn(STUBBORN_CHILD, tmp_path / "server.log") as server:
        log = wait_for_log(server, "deaf")
        child = int(log.split("child ")[1].split()[0])
        assert is_running(child)
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(server: Server) -> int:
    """The process id of a server that was seen to have ended."""
    assert server._process is not None
    deadline = time.monotonic() + 30
    while server.running():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return server._process.pid


def test_what_is_killed_still_has_the_number_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended long ago, so its number could be another's by now if it had been reaped."""
    killed: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(os, "killpg", lambda group, by: killed.append((group, by, Path(f"/proc/{group}").exists())))
    with StandIn(ENDS_AT_ONCE, tmp_path / "log") as server:
        pid = ended(server)
        with pytest.raises(ServerError, match="status 3"):
            server.wait_ready(30)
    assert killed == [(pid, signal.SIGKILL, True)]
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_something_else_has_reaped_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[Any] = []
    with StandIn(ENDS_AT_ONCE, tmp_path / "log") as server:
        os.waitpid(ended(server), 0)
        assert not server.running()
        monkeypatch.setattr(os, "killpg", lambda *sent: signals.append(sent))
        monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    assert signals == []


def test_processes_that_may_not_be_looked_at_are_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def hidden(path: Path, *given: Any, **named: Any) -> str:
        if path == Path("/proc/1/stat"):
            raise PermissionError(13, "Permission denied")
        return read(path, *given, **named)

    with StandIn(SILENT, tmp_path / "log") as server:
        monkeypatch.setattr(Path, "read_text", hidden)
        server.stop()
        assert not server.running()


def test_a_process_with_half_a_character_in_its_name_is_in_nobodys_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HALF_A_CHARACTER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"named\n"
        try:
            with StandIn(SILENT, tmp_path / "log") as server:
                assert server.running()
            assert not server.running()
        finally:
            other.kill()


def test_failure_in_the_body_stops_the_server(tmp_path: Path) -> None:
    server = StandIn(SILENT, tmp_path / "server.log")
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert not server.running()


def test_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    starter = (
        "import os, signal, sys, pathlib, tests.cli.test_server as this\n"
        "server = this.StandIn(this.SILENT, pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", starter, str(tmp_path / "server.log")]
    shown = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    pid = int(shown.stdout)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stop_twice_is_harmless(tmp_path: Path) -> None:
    with StandIn(SILENT, tmp_path / "server.log") as server:
        server.stop()
        server.stop()


def test_command_serves_on_the_loopback_address_only(tmp_path: Path) -> None:
    server = Server("some/model", ["--enforce-eager"], {}, tmp_path / "server.log", port=1234)
    assert server.command[1:] == ["serve", "some/model", "--host", "127.0.0.1", "--port", "1234", "--enforce-eager"]


def test_log_tail_of_no_log_is_empty(tmp_path: Path) -> None:
    assert Server("model", [], {}, tmp_path / "absent.log").log_tail() == ""


def test_core_list_names_the_cores_of_this_process() -> None:
    assert {int(core) for core in core_list().split(",")} == os.sched_getaffinity(0)


def test_free_port_is_a_user_port() -> None:
    assert 1024 <= free_port() < 65536
