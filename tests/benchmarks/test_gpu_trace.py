"""What is read out of a profiler's trace."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.gpu_trace import Event, busy, decode_steps, main, read_events


def event(cat: str, name: str, begin: float, length: float) -> Event:
    return {"cat": cat, "ph": "X", "name": name, "ts": begin, "dur": length}


def step(rows: int, begin: float, length: float, context: int = 0) -> Event:
    return event(
        "gpu_user_annotation", f"execute_context_{context}({context})_generation_{rows}({rows})", begin, length
    )


TRACE = [
    step(1, 0, 90, context=1),
    step(2, 200, 80),
    step(2, 100, 80),
    step(2, 300, 90),
    step(1, 400, 50),
    event("kernel", "prompt", 0, 90),
    event("kernel", "gemm", 100, 40),
    event("kernel", "attend", 130, 30),  # overlaps the other kernel
    event("gpu_memcpy", "copy", 195, 10),
    event("kernel", "gemm", 300, 145),  # the last step ends at 390
    event("cpu_op", "aten::mm", 210, 60),
]


def test_idle_is_what_nothing_covers_between_the_steps_ends() -> None:
    found = busy(TRACE)
    assert found.steps == 3
    assert found.step_us == pytest.approx(100)
    assert found.idle == pytest.approx(1 - (60 + 10 + 90) / 290)
    assert found.kernels == {"gemm": (2, 40 + 90), "attend": (1, 30), "copy": (1, 10)}


def test_a_trace_without_decode_steps_says_nothing() -> None:
    with pytest.raises(ValueError, match="the trace has 0 decode steps on a GPU, and must have 2 at the least"):
        decode_steps([event("kernel", "gemm", 0, 1)])
    with pytest.raises(ValueError, match="the trace has 1 decode steps"):
        decode_steps([step(3, 0, 1), step(2, 5, 1), step(2, 9, 1)])


def test_a_file_packed_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(json.dumps({"traceEvents": TRACE}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_events(plain) == read_events(packed) == TRACE
    assert main([str(packed), "--kernels", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 decode steps, 0.10 ms each, the GPU idle for 44.8%"
    assert len(lines) == 5
    assert "gemm" in lines[-1]


def test_a_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 1
    assert "gpu_trace: none.json" in capsys.readouterr().err
