"""The runner, on servers that only say what they are told: what it asks, compares, keeps and resumes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from benchmarks.accuracy import served_tasks
from benchmarks.accuracy.rows import read_rows
from benchmarks.serving.streams import Stream
from tests.benchmarks.tiny import byte_tokenizer, tiny_model

SAID = {"full": "a b 12", "stock": "a b 12", "quest-2%": "a b 31"}
READ_BYTES = {"full": 400, "quest-2%": 100}  # for each answer, of 400 in all


class TalkingServer:
    """Stand-in for a server with one selection: its settings decide what it says."""

    started: ClassVar[list[str]] = []

    def __init__(self, _model: Path, args: Sequence[str], _env: dict[str, str], _log_path: Path) -> None:
        ours = [json.loads(arg.partition("=")[2]) for arg in args if arg.startswith("--additional-config")]
        settings = ours[0]["hybrid_sparse"] if ours else None
        self.selection = next(name for name, served in served_tasks.SERVED.items() if served == settings)
        self.answers = 0
        self.started.append(self.selection)

    def wait_ready(self, _timeout_s: float) -> None: ...

    def metrics(self) -> str:
        if self.selection == "stock":
            return ""
        return "".join(
            f'vllm_hybrid_sparse_{name}_bytes_total{{engine="0"}} {self.answers * count}\n'
            for name, count in (("read", READ_BYTES[self.selection]), ("context", 400))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None: ...


@pytest.fixture
def model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder. No results are saved, and the commit is `abc`."""
    path = tmp_path / "tiny"
    tiny_model().save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)

    def stream_all(server: TalkingServer, prompts: Any, _max_tokens: int, *, may_end: bool) -> list[Stream]:
        assert may_end
        assert len(prompts) == 1
        server.answers += 1
        return [Stream(0.0, ((0.1, 1),), (*tokenizer(SAID[server.selection]).input_ids, 256))]

    monkeypatch.setattr(served_tasks, "Server", TalkingServer)
    monkeypatch.setattr(served_tasks, "stream_all", stream_all)
    monkeypatch.setattr(served_tasks, "save", lambda *_: None)
    monkeypatch.setattr(served_tasks, "commit", lambda: "abc")
    monkeypatch.setattr(TalkingServer, "started", [])
    return path


def arguments(model_path: Path, *more: str) -> list[str]:
    few = ["--tasks", "qa_1", "--samples", "2", "--lengths", "1500"]
    return ["--model", str(model_path), "--format", "plain", *few, *more]


def test_answers_are_compared_with_full_attentions(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = served_tasks.main(arguments(model_path, "--selections", "stock,quest-2%"))
    assert TalkingServer.started == ["full", "stock", "quest-2%"]
    assert [row["identity"]["selection"] for row in rows] == ["full"] * 2 + ["stock"] * 2 + ["quest-2%"] * 2
    assert {row["identity"]["runs_on"] for row in rows} == {"server"}
    full, stock, quest = rows[0], rows[2], rows[4]
    assert full["answer"] == stock["answer"] == "a b 12"
    assert stock["exactly_equal"] == stock["equal_before_difference"] == 1
    assert quest["exactly_equal"] == 0
    assert quest["equal_before_difference"] == 4 / 7  # 4 of the 7 tokens of "a b 12" and its end agree
    assert (quest["read_bytes"], quest["total_bytes"]) == (100, 400)
    assert "read_bytes" not in stock
    table = [line for line in capsys.readouterr().out.splitlines() if "quest-2%" in line]
    assert "25.0%" in table[0]


def test_a_second_run_starts_servers_only_for_what_is_missing(model_path: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "rows.jsonl")]
    first = served_tasks.main(arguments(model_path, "--selections", "quest-2%", *out))
    assert first == read_rows(tmp_path / "rows.jsonl")
    both = served_tasks.main(arguments(model_path, "--selections", "quest-2%,stock", *out))
    assert TalkingServer.started == ["full", "quest-2%", "stock"]
    assert both[:4] == first


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--selections", "oracle-5%"], "--selections=oracle-5%: must be among full, "),  # known to the laboratory only
        (["--tasks", "niah"], "--tasks=niah: must be among niah_single_1"),
        (["--lengths", "9999"], "--lengths=9999: the model has 4096 positions"),
    ],
)
def test_what_cannot_be_run_is_refused(model_path: Path, wrong: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        served_tasks.main(arguments(model_path, *wrong))
    assert TalkingServer.started == []
