"""One `vllm serve` process: started, waited for, and stopped by the pid it was given."""

import contextlib
import ctypes
import http.client
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_hybrid_sparse.errors import HybridSparseError

HOST = "127.0.0.1"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.25
_METRICS_TIMEOUT_S = 10.0
_GRACE_S = 30.0  # time for the engine to finish and write its last log lines
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT  # whether a child has ended, without reaping it
_SERVER_PORTS = range(20000, 30000)
_PORT_TRIES = 100
# The last line of a traceback, after the prefix that vLLM adds: "(Worker pid=7) ERROR … [core.py:9] ValueError: …".
_EXCEPTION = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .*)")
_ERRORS_SHOWN = 3
_NO_ANSWER = (OSError, http.client.HTTPException)  # none at all, or one that is cut off or no HTTP
_ASK = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # a proxy does not know our loopback address


class ServerError(HybridSparseError, RuntimeError):
    """A server that ended or stayed silent; the text names the first errors of its log and ends with its tail."""


def free_port() -> int:
    """Return a port on the loopback address that nothing listens on at this moment.

    It lies below the range that the kernel gives to outgoing connections. In the half minute that a server needs before
    it listens, some client often takes a port in that range.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_SERVER_PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port found among {_SERVER_PORTS.start} to {_SERVER_PORTS.stop - 1}")


def core_list() -> str:
    """Return the cores this process may use in the form of `VLLM_CPU_OMP_THREADS_BIND`, e.g. ``0,1,2,3``."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def _end_with_parent() -> None:
    """In the child, before it becomes the server: have the kernel end it if the starting thread dies unexpectedly."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _status(child: int) -> int | None:
    """Return the status of a child that has ended, negative if a signal ended it; None while it runs.

    The child is not reaped, so its id, and that of its group, cannot become another process's. If something else has
    reaped it, its status is unknown, and taken as 0.
    """
    try:
        ended = os.waitid(os.P_PID, child, _LOOK)
    except ChildProcessError:
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _group_alive(group: int) -> bool:
    """Return whether a process of the group is seen to run; one that ended but was not reaped does not count.

    The engine and its workers outlive the API server for a moment, in which they write their last log lines. A process
    that we may not look at (`hidepid`) is passed over.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is another user's
        if int(its_group) == group and state not in "ZX":
            return True
    return False


class Server:
    """A server of one model on the loopback address, in a process group of its own.

    model      folder or name, as `vllm serve` takes it
    args       further arguments of `vllm serve`
    env        variables set on top of this process's own
    log_path   stdout and stderr of the server; overwritten
    port       None: a free one

    As a context manager it starts on entry and stops on exit, whatever happened in between. If this process is killed,
    the server ends by itself. It also ends when the thread that started it does.
    """

    def __init__(
        self,
        model: str | Path,
        args: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        port: int | None = None,
    ) -> None:
        self.model = str(model)
        self.args = list(args)
        self.env = dict(env)
        self.log_path = log_path
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Root of the OpenAI-compatible API."""
        return f"http://{HOST}:{self.port}/v1"

    @property
    def command(self) -> list[str]:
        """The command line that `start` runs: the `vllm` next to the running Python."""
        vllm = str(Path(sys.executable).parent / "vllm")
        return [vllm, "serve", self.model, "--host", HOST, "--port", str(self.port), *self.args]

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it answers."""
        if self._process is not None:
            raise ServerError(f"server on port {self.port}: started twice")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, no lock taken
            )

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until the server answers; return the seconds that took.

        Raises ServerError if the process ends or `timeout_s` passes first.
        """
        if self._process is None:
            raise ServerError(f"server on port {self.port}: not started")
        begun = time.monotonic()
        while True:
            waited_s = time.monotonic() - begun
            if (status := _status(self._process.pid)) is not None:
                raise self.failure(f"ended with status {status} before it was ready")
            if self._healthy():
                return waited_s
            if waited_s > timeout_s:
                raise self.failure(f"not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self._process is not None and _status(self._process.pid) is None

    def stop(self) -> None:
        """End the server: ask it to end, then kill what is left of its process group.

        Does nothing if the server is not started or already stopped. The server's process is reaped last, so that what
        is killed is its group and never one that was given its number later.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            deadline = time.monotonic() + _GRACE_S
            if _status(process.pid) is None:
                os.kill(process.pid, signal.SIGTERM)  # Popen's own `terminate` would reap it
            while (_status(process.pid) is None or _group_alive(process.pid)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            with contextlib.suppress(ChildProcessError):  # something else reaped it: its number may be another's
                os.waitid(os.P_PID, process.pid, _LOOK)
                os.killpg(process.pid, signal.SIGKILL)  # start_new_session made the pid the group's id
            process.wait()

    def metrics(self) -> str:
        """Return the text of the server's /metrics; ServerError if it does not answer."""
        try:
            with _ASK(f"http://{HOST}:{self.port}/metrics", timeout=_METRICS_TIMEOUT_S) as answer:
                return str(answer.read().decode("utf-8"))
        except _NO_ANSWER as error:
            raise self.failure(f"/metrics does not answer ({error})") from error

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the server's log; empty if there is none."""
        if not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def first_errors(self) -> list[str]:
        """Return the first few different exceptions of the server's log: when one process fails, others follow."""
        if not self.log_path.is_file():
            return []
        found: dict[str, None] = {}
        with self.log_path.open(encoding="utf-8", errors="replace") as log:
            for line in log:
                if (match := _EXCEPTION.search(line)) is not None:
                    found[match[1]] = None
        return list(found)[:_ERRORS_SHOWN]

    def failure(self, what: str) -> ServerError:
        """Return an error that says what happened and shows the first exceptions and the end of the log."""
        errors = "".join(f"\n  {error}" for error in self.first_errors())
        first = f"; the first errors:{errors}\n" if errors else "; "
        return ServerError(f"server on port {self.port}: {what}{first}the end of {self.log_path}:\n{self.log_tail()}")

    def _healthy(self) -> bool:
        try:
            with _ASK(f"http://{HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except _NO_ANSWER:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
