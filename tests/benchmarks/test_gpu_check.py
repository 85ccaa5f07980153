"""The stages of gpu-check: each runs by itself, whatever happens to the others."""

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_check, gpu_serving
from benchmarks.gpu_check import Outcome, Stage, run_all, run_stage, stage_threads, stages, table


def python(name: str, script: str, timeout_s: int = 60) -> Stage:
    """A stage that runs a line of Python."""
    return Stage(name=name, command=(sys.executable, "-c", script), timeout_s=timeout_s)


def touching(alive: Path) -> str:
    """A script that touches a file for as long as it runs."""
    return f"import pathlib, time\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"


def parent_of(child: str) -> str:
    """A script that runs another one and waits for it."""
    return f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"


def check_ended(alive: Path) -> None:
    """Check that the file was touched, and is not touched any more."""
    assert alive.exists()
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()


@pytest.mark.parametrize(
    ("script", "status", "last_line"),
    [
        ("print('first'); print('all well'); print()", "ok", "all well"),
        ("import sys; print('half way', flush=True); sys.exit('it broke')", "FAILED", "it broke"),
        ("import os; os.abort()", "FAILED", ""),
        ("import sys; print('vllm is not installed'); sys.exit(77)", "not installed", "vllm is not installed"),
    ],
)
def test_a_stage_ends_with_its_status_and_last_line(script: str, status: str, last_line: str, tmp_path: Path) -> None:
    outcome = run_stage(python("a stage", script), tmp_path / "a.log")
    assert (outcome.status, outcome.last_line, outcome.log) == (status, last_line, "a.log")


def test_a_stage_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    outcome = run_stage(python("hangs", parent_of(touching(alive)), timeout_s=6), tmp_path / "a.log")
    assert outcome.status == "TIMED OUT"
    check_ended(alive)


def test_a_stage_ends_the_groups_that_it_has_made_itself(tmp_path: Path) -> None:
    """`gpu_timing` makes such groups: its sides are stages of its own."""
    alive = tmp_path / "alive"
    script = (
        "import pathlib, signal, sys; from benchmarks.gpu_check import Stage, run_stage\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        f"side = Stage(name='side', command=(sys.executable, '-c', {touching(alive)!r}), timeout_s=60, grace_s=1.0)\n"
        f"run_stage(side, pathlib.Path({str(tmp_path / 'b.log')!r}))"
    )
    outcome = run_stage(python("cut off", script, timeout_s=12), tmp_path / "a.log")
    assert outcome.status == "TIMED OUT"
    check_ended(alive)


@pytest.mark.parametrize(
    ("codes", "status"), [((0, 0), 0), ((-11, 0), 1), ((1, 77), 1), ((77, 0), 77), ((77, -6), 1), ((77, 77), 77)]
)
def test_one_smoke_stage_that_fails_fails_them_all(
    codes: tuple[int, int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("smoke", gpu_check.REPOSITORY / "deploy" / "gpu" / "smoke.py")
    assert spec is not None
    assert spec.loader is not None
    smoke = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smoke)
    left = list(codes)
    monkeypatch.setattr(smoke.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=left.pop(0)))
    assert smoke.main(["ops", "merge"]) == status


def test_a_failure_stops_no_other_stage_and_the_summary_has_them_all(tmp_path: Path) -> None:
    parts = [
        python("smoke: one", "import sys; sys.exit(3)"),
        python("serving", "import sys; print('no vllm'); sys.exit(77)"),
        python("tests", "print('2 passed')"),
    ]
    said: list[str] = []
    outcomes = run_all(parts, tmp_path, {"gpu": "a GPU"}, said.append)
    assert [outcome.status for outcome in outcomes] == ["FAILED", "not installed", "ok"]
    assert [outcome.failed for outcome in outcomes] == [True, False, False]
    assert said == ["gpu-check 1/3: smoke: one", "gpu-check 2/3: serving", "gpu-check 3/3: tests"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["gpu"] == "a GPU"
    assert [stage["status"] for stage in summary["stages"]] == ["FAILED", "not installed", "ok"]
    assert [stage["log"] for stage in summary["stages"]] == ["01-smoke--one.log", "02-serving.log", "03-tests.log"]
    assert (tmp_path / "03-tests.log").read_text() == "2 passed\n"


def test_the_summary_is_there_while_a_later_stage_still_runs(tmp_path: Path) -> None:
    """A run that is cut off leaves the results it has."""
    look = f"import json; print(len(json.load(open({str(tmp_path / 'summary.json')!r}))['stages']))"
    outcomes = run_all([python("first", ""), python("second", look)], tmp_path, {}, lambda _text: None)
    assert outcomes[1].last_line == "1"


def test_what_runs_is_killed_and_nothing_more_begins_where_the_block_is_left(tmp_path: Path) -> None:
    """Its children are killed, too: one that stayed would hold the GPU's memory."""
    alive, outcomes = tmp_path / "alive", []

    def leave() -> None:
        with stage_threads(1) as threads:
            for name in ("first", "second"):
                stage = python(name, parent_of(touching(alive)))
                outcomes.append(threads.submit(run_stage, stage, tmp_path / f"{name}.log"))
            while not alive.exists():
                time.sleep(0.05)
            raise SystemExit(143)

    begun = time.monotonic()
    with pytest.raises(SystemExit):
        leave()
    assert time.monotonic() - begun < 30
    assert outcomes[0].result().failed
    assert outcomes[1].cancelled()
    check_ended(alive)


def test_the_table_has_a_line_for_each_stage() -> None:
    outcome = Outcome(name="tests", status="FAILED", seconds=12.4, last_line="x" * 200, log="01-tests.log")
    lines = table([outcome]).splitlines()
    assert len(lines) == 3
    assert "FAILED" in lines[2]
    assert "x" * 70 in lines[2]
    assert "x" * 71 not in lines[2]


def test_every_case_of_serving_is_run(tmp_path: Path) -> None:
    (serving,) = (stage for stage in stages(tmp_path) if stage.name == "serving")
    options = gpu_serving.parse_arguments(serving.command[3:])
    assert sorted(options.cases) == sorted(gpu_serving.CASES)


def test_every_program_that_a_stage_runs_exists(tmp_path: Path) -> None:
    for stage in stages(tmp_path):
        for word in stage.command:
            if word.endswith(".py"):
                assert Path(word).is_file()


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: None)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_runs_the_stages_asked_for_and_fails_where_one_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [python("good", "print('fine')"), python("bad", "raise SystemExit(1)"), python("other", "print()")]
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: "NVIDIA H200, 143771 MiB, 580")
    monkeypatch.setattr(gpu_check, "stages", lambda _out: parts)
    assert gpu_check.main(["--out", str(tmp_path), "--only", "good"]) == 0
    assert gpu_check.main(["--out", str(tmp_path), "--only", "good,bad"]) == 1
    shown = capsys.readouterr().out
    assert "NVIDIA H200" in shown
    assert shown.rstrip().splitlines()[-1].startswith("| bad")
    assert gpu_check.main(["--out", str(tmp_path), "--only", "none"]) == 2
