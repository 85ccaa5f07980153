"""`hybrid-sparse bench`, interrupted: what was measured is written, and nothing goes on."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bench import bench, report
from tests.load.fake_server import FakeServer, Reply, answer_in_full, serving, token


def test_an_interruption_writes_what_was_measured(tmp_path: Path) -> None:
    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        if "stay" not in body["prompt"]:
            return answer_in_full(server, body)
        return Reply([token("a")], then="hang", before=lambda: os.kill(os.getpid(), signal.SIGINT))

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 3}\n' * 2 + '{"prompt": "stay with me", "max_tokens": 3}\n' * 3)
    with serving(answer) as server:
        options = ("--trace", str(trace), "--clients", "1", "--warm-up", "1", "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, *options) == 130
        assert server.gone.wait(10)
    content = report(tmp_path / "r")
    figures = content["servers"][0]["figures"]
    assert content["interrupted"]
    assert figures["outcomes"] == {"ok": 2, "aborted": 1}
    assert figures["not_sent"] == 2


def test_an_interruption_while_the_trace_is_made_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens of each task are counted by the server, which may take minutes."""

    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        if len(server.requests) < 3:
            return answer_in_full(server, body)
        return Reply([token("a")], then="hang", before=lambda: os.kill(os.getpid(), signal.SIGINT))

    with serving(answer) as server:
        options = ("--tasks", "all", "--task-tokens", "1024", "--requests", "4", "--rate", "1")
        assert bench("--url", server.url, *options, "--out", str(tmp_path / "r")) == 130
        assert len(server.requests) == 3
    assert "interrupted before anything was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Gone(io.StringIO):
    """An output that nobody reads any more."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_an_interruption_that_ends_the_reader_of_its_output_too_writes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C also reaches a `tee` that reads the output."""

    def interrupt() -> None:
        monkeypatch.setattr("sys.stderr", Gone())
        monkeypatch.setattr("sys.stdout", Gone())
        os.kill(os.getpid(), signal.SIGINT)

    def answer(server: FakeServer, body: dict[str, Any]) -> Reply:
        stays = "stay" in body["prompt"]
        return Reply([token("a")], then="hang", before=interrupt) if stays else answer_in_full(server, body)

    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "stay with me", "max_tokens": 3}\n')
    with serving(answer) as server:
        options = ("--trace", str(trace), "--clients", "1", "--warm-up", "1", "--out", str(tmp_path / "r"))
        assert bench("--url", server.url, *options) == 130
    assert report(tmp_path / "r")["servers"][0]["figures"]["outcomes"] == {"ok": 1, "aborted": 1}
