"""supervise.sh, with small programs in place of the server."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY

SUPERVISE = DEPLOY / "supervise.sh"
WITHIN_S = 60.0
TOLD = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Supervise a line of shell in a separate folder. At the end, processes that are left are killed.

    A shell cannot trap a signal that was ignored when it started, as SIGHUP is below `nohup` and SIGINT in what a
    script runs in the background, so that is undone here.
    """
    ignored = [told for told in TOLD if signal.getsignal(told) is signal.SIG_IGN]
    for told in ignored:
        signal.signal(told, signal.SIG_DFL)
    running: list[subprocess.Popen[str]] = []

    def supervise(line: str, **env: str) -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [SUPERVISE, "bash", "-c", line],
                cwd=tmp_path,
                env=os.environ | env,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return running[-1]

    yield supervise
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the group: a server may outlive its supervisor
        process.communicate()
    for told in ignored:
        signal.signal(told, signal.SIG_IGN)


def wait_for(seen: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not seen():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$"])
def test_it_starts_again_whatever_the_status(start: Start, tmp_path: Path, end: str) -> None:
    start(f"echo up >>starts; {end}")
    wait_for(lambda: len(lines(tmp_path / "starts")) >= 2)


@pytest.mark.parametrize("told", TOLD)
def test_told_to_stop_it_tells_the_server_and_ends_with_its_status(
    start: Start, tmp_path: Path, told: signal.Signals
) -> None:
    process = start("trap 'echo told >>starts; exit 7' TERM; echo up >>starts; while :; do sleep 0.05; done")
    wait_for(lambda: lines(tmp_path / "starts") == ["up"])
    process.send_signal(told)
    assert process.wait(WITHIN_S) == 7
    assert lines(tmp_path / "starts") == ["up", "told"]  # and it was not started again


def test_told_to_stop_before_it_knows_the_server_s_pid_it_tells_it_nevertheless(start: Start, tmp_path: Path) -> None:
    """The server's first act is the signal, and the supervisor takes half a second to note the pid."""
    slow = tmp_path / "slow.sh"
    slow.write_text("set -T; trap '[[ $BASH_COMMAND != child=* ]] || sleep 0.5' DEBUG\n")
    process = start("kill -TERM $PPID; exec sleep 600", BASH_ENV=str(slow))
    assert process.wait(WITHIN_S) == 128 + signal.SIGTERM


def test_it_waits_for_a_server_that_takes_its_time_to_stop(start: Start, tmp_path: Path) -> None:
    process = start(
        "trap 'sleep 1; echo drained >>starts; exit 0' TERM; echo up >>starts; while :; do sleep 0.05; done"
    )
    wait_for(lambda: lines(tmp_path / "starts") == ["up"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 0
    assert lines(tmp_path / "starts") == ["up", "drained"]


def test_told_to_stop_in_a_pause_it_ends_without_another_start(start: Start, tmp_path: Path) -> None:
    process = start("echo up >>starts; [[ $(wc -l <starts) -lt 3 ]]")
    wait_for(lambda: len(lines(tmp_path / "starts")) >= 3)  # now it pauses for 4 s
    process.send_signal(signal.SIGTERM)
    process.wait(WITHIN_S)
    assert len(lines(tmp_path / "starts")) == 3


def test_pauses_double_to_a_bound_and_a_server_that_settled_begins_anew(start: Start, tmp_path: Path) -> None:
    process = start("echo up >>starts; [[ $(wc -l <starts) != 4 ]] || sleep 5", SETTLED_S="5", LONGEST_PAUSE_S="2")
    wait_for(lambda: len(lines(tmp_path / "starts")) >= 5)
    process.send_signal(signal.SIGTERM)
    process.wait(WITHIN_S)
    assert process.stderr is not None
    said = [line.rpartition(" in ")[2] for line in process.stderr.read().splitlines() if "starting" in line]
    assert said[:4] == ["1 s", "2 s", "2 s", "1 s"]


def test_without_a_command_it_says_so() -> None:
    done = subprocess.run([SUPERVISE], capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert (done.returncode, done.stderr) == (2, "supervise: needs the server's command line\n")
