"""Runs everything that needs an NVIDIA GPU, in one go: `make gpu-check`.

    python -m benchmarks.gpu_check [--out DIR] [--only STAGE,…]

The stages run in order of importance, each in a process of its own. One that fails or hangs stops no other, and a run
that is cut off has done what matters most. DIR gets the whole log of each stage and `summary.json`, which is rewritten
after every stage; the table comes last. Exits with 1 if a stage failed, and with 2 if there is no GPU.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.machine import REPOSITORY, provenance
from benchmarks.report import markdown_table

_SHOWN_LINES = 40  # of the log of a stage that failed
_running: set[subprocess.Popen[bytes]] = set()  # the stages that this process runs now

NOT_INSTALLED = 77
"""Exit status of a stage that lacks what it needs (deploy/gpu/smoke.py)."""

CORES_PER_ENGINE = 1.25
"""Cores for each engine or test that runs at the same time; this few because each waits now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the check."""

    name: str
    command: tuple[str, ...]
    timeout_s: int = 300
    grace_s: float = 10.0  # for ending what the stage itself has started, when its time is up


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a stage."""

    name: str
    status: str  # ok | FAILED | TIMED OUT | not installed
    seconds: float
    last_line: str  # of its output
    log: str  # file name

    @property
    def failed(self) -> bool:
        """Whether this makes the whole check fail."""
        return self.status in ("FAILED", "TIMED OUT")


def stages(out: Path) -> list[Stage]:
    """All stages, most important first; they may leave files in `out`."""
    python = sys.executable
    jobs = max(1, int((os.cpu_count() or 1) / CORES_PER_ENGINE))
    smoke = str(REPOSITORY / "deploy" / "gpu" / "smoke.py")
    return [
        Stage(name="smoke: vLLM's operators", command=(python, smoke, "ops")),
        Stage(name="smoke: merge_state", command=(python, smoke, "merge")),
        Stage(
            name="tests",
            command=(
                *("env", "TRITON_INTERPRET=0", python, "-m", "pytest", "-m", "gpu", "-q", "tests/kernels"),
                *("-n", str(jobs)),  # most of their time goes into compiling with Triton
            ),
            timeout_s=600,
        ),
        Stage(
            name="kernel benchmarks",
            command=(python, "-m", "benchmarks.kernels.device_kernels", "--out", str(out / "device_kernels.json")),
            timeout_s=600,
        ),
        Stage(name="smoke: FLASH_ATTN", command=(python, smoke, "flash_attn")),
        Stage(name="smoke: CUDA graphs", command=(python, smoke, "graphs")),
        Stage(name="smoke: TRITON_ATTN", command=(python, smoke, "triton_attn")),
        Stage(
            name="serving",
            command=(
                *(python, "-m", "benchmarks.gpu_serving"),
                *("dense", "resident", "ranked", "ranked_threshold", "graphs", "ranked_graphs"),
                *("small_pool", "threshold", "shared", "salient", "predicted", "runner_v1"),
                *("--jobs", str(jobs), "--logs", str(out / "serving")),
            ),
            timeout_s=600,
        ),
        Stage(
            name="time per token",
            # A quarter of an 8B model's layers, since vLLM fills the host's KV cache on one core.
            command=(
                *(python, "-m", "benchmarks.gpu_timing", "--layers", "8", "--device-gib", "1", "--side-timeout", "130"),
                *("--cases", "8Kx1,8Kx8,32Kx4,128Kx1", "--out", str(out / "gpu_timing.json")),
            ),
            timeout_s=580,
        ),
    ]


def run_stage(stage: Stage, log: Path) -> Outcome:
    """Run one stage with all its output in `log`, and end it with its children when its time is up."""
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.command,
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        _running.add(process)
        try:
            code: int | None = process.wait(stage.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            ask_to_end(process, stage.grace_s)
            end_group(process)
            _running.discard(process)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    status = {0: "ok", None: "TIMED OUT", NOT_INSTALLED: "not installed"}.get(code, "FAILED")
    return Outcome(
        name=stage.name,
        status=status,
        seconds=round(time.monotonic() - begun, 1),
        last_line=lines[-1].strip() if lines else "",
        log=log.name,
    )


@contextlib.contextmanager
def stage_threads(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that run stages side by side; wait inside the block for what you submit to them.

    If an exception ends the block, such as SIGTERM's, running stages are killed with their children and no more begin.
    """
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        try:
            yield threads
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                end_group(process)
            raise


def last_lines(log: Path) -> str:
    """The end of a stage's log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:])


def ask_to_end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Let a stage that still runs end the process groups that it has made itself."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a stage: the process and the children that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(parts: Sequence[Stage], out: Path, machine: dict[str, object], say: Callable[[str], None]) -> list[Outcome]:
    """Run the stages in order and keep the summary up to date."""
    outcomes: list[Outcome] = []
    for number, stage in enumerate(parts, 1):
        say(f"gpu-check {number}/{len(parts)}: {stage.name}")
        slug = "".join(letter if letter.isalnum() else "-" for letter in stage.name.lower())
        outcomes.append(run_stage(stage, out / f"{number:02}-{slug}.log"))
        summary = {**machine, "stages": [asdict(outcome) for outcome in outcomes]}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per stage."""
    width = 70
    return markdown_table(
        ("stage", "", "s", "last line", "log"),
        [
            (outcome.name, outcome.status, f"{outcome.seconds:.0f}", outcome.last_line[:width], outcome.log)
            for outcome in outcomes
        ],
    )


def find_gpu() -> str | None:
    """Name, memory and driver of the first GPU, as nvidia-smi gives them; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.splitlines()[0] if shown else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages or some, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of logs and summary")
    parser.add_argument("--only", default="", help="stages whose names begin so, comma-separated")
    options = parser.parse_args(arguments)
    gpu = find_gpu()
    if gpu is None:
        print("gpu-check: needs an NVIDIA GPU, and nvidia-smi lists none on this machine", file=sys.stderr)
        return 2
    out = options.out.resolve()
    wanted = [name for name in options.only.split(",") if name]
    parts = [stage for stage in stages(out) if not wanted or any(stage.name.startswith(name) for name in wanted)]
    if not parts:
        names = ", ".join(stage.name for stage in stages(out))
        print(f"gpu-check: --only={options.only}: must begin the name of a stage: {names}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(parts, out, provenance() | {"gpu": gpu}, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{gpu}; logs and summary.json in {options.out}\n")
    print(table(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
