"""Compares greedy answers of vLLM with hybrid_sparse, in cases where it must be exact, with another backend's.

    python -m benchmarks.gpu_serving CASE… [--jobs 4] [--baseline FLASH_ATTN] [--dtype bfloat16] [--device cuda]

A random Llama of four layers answers prompts from 3 to 1500 tokens, with shared beginnings, in chunks. Each engine runs
in a process of its own, `--jobs` of them at a time, the baseline's first. transformers gives the right answers, in
float32. Ours must be as exact in float32, and about as near as the baseline at half precision (`gpu_answers.py`).
Otherwise the case has failed and the exit status is 1; if an engine gave no answers, the end of its log is shown. The
status is 77 if vLLM is not installed. On a machine without a GPU: `--baseline CPU_ATTN --dtype float32 --device
emulated`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_answers import (
    NEW_TOKENS,
    SHOWN,
    Answers,
    compare,
    most_error,
    prompts,
    right_answers,
    write_model,
)
from benchmarks.gpu_check import NOT_INSTALLED, Stage, last_lines, run_stage, stage_threads
from benchmarks.serving.backends import stop_servers_when_terminated
from vllm_hybrid_sparse.errors import LoadError

DTYPES = ("bfloat16", "float16", "float32")

NEARLY_ALL = 0.999999
ALL_SALIENT = 1e-9  # as HGCA's beta: every token with any weight is salient
RETAINED = {"sink_tokens": 16, "window_tokens": 64}
# Every row is a two-tier row, and the host chooses its pages.
TIERED = {**RETAINED, "policy": "dense", "device_resident_share": 0, "device_ranking": "host"}
# The device chooses the pages of every row by itself, in a pool too small for them.
RANKED = {**TIERED, "device_ranking": "device", "device_pool_pages": 512, "admission": "none"}


class EngineError(RuntimeError):
    """An engine ended without answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of serving that must change no answer."""

    settings: Mapping[str, Any]
    env: Mapping[str, str]
    eager: bool = True


CASES = {
    "dense": Case(settings=TIERED, env={}),
    # The device reads rows by itself, with room for half of the requests.
    "resident": Case(
        settings={**TIERED, "device_pool_pages": 2048, "device_resident_share": 0.8, "admission": "none"}, env={}
    ),
    "ranked": Case(settings=RANKED, env={}),
    # Pages are scored and ordered by key codes, and read until what is left out rounds away.
    "ranked_threshold": Case(
        settings={**RANKED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4}, env={}
    ),
    # As in normal use: some rows are read whole, others ranked, and the rest of the model runs in graphs.
    "graphs": Case(settings={**RANKED, "device_pool_pages": 2048, "device_resident_share": 0.5}, env={}, eager=False),
    "ranked_graphs": Case(
        settings={**RANKED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4},
        env={},
        eager=False,
    ),
    "small_pool": Case(settings={**TIERED, "device_pool_pages": 32, "admission": "none"}, env={}),
    "shared": Case(settings={**TIERED, "host_share": "queue"}, env={}),
    # Below 1, so that the verifying kernel runs, but so near to 1 that what is left out rounds away.
    "threshold": Case(
        settings={**TIERED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4}, env={}
    ),
    # HGCA with the window on the device and everything else salient, so on the host.
    "salient": Case(settings={**RETAINED, "policy": "hgca", "hgca_beta": ALL_SALIENT}, env={}),
    # Fluxion with a predictor that asks for everything; the host chooses, and all is read from one queue.
    "predicted": Case(settings={**RETAINED, "policy": "fluxion", "dense_tokens": 0, "host_share": "queue"}, env={}),
    "runner_v1": Case(settings={**TIERED, "device_resident_share": 0.5}, env={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
}


def answer(folder: Path, backend: str, dtype: str, settings: Mapping[str, Any] | None, *, eager: bool) -> Answers:
    """Answer every prompt in this process: for each request, `[token, [[token, log-probability], …]]` by place."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    ours = {"additional_config": {"hybrid_sparse": dict(settings)}} if settings is not None else {}
    llm = LLM(
        str(folder),
        attention_backend=backend,
        dtype=dtype,
        max_model_len=2048,
        max_num_batched_tokens=256,  # long prompts come in chunks, together with rows that decode
        gpu_memory_utilization=0.25,  # other engines may run at the same time
        kv_cache_memory_bytes=2**28,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        enable_flashinfer_autotune=False,  # it tunes kernels that are not used here, on made-up steps
        seed=0,
        **ours,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=SHOWN, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], sampling)
    if settings is not None and (failed := sum(llm.collective_rpc("failed_loads"))):
        raise LoadError(f"{failed} loads of pages failed, and the host attended to them: see the log")
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        answers.append(
            [
                [token, [[other, entry.logprob] for other, entry in entries.items()]]
                for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
        )
    return answers


def run_engine(arguments: Sequence[str], env: Mapping[str, str], out: Path, timeout_s: int) -> Any:
    """Answer in a process of its own, whose output goes to a `.log` next to `out`. EngineError if it gives none."""
    command = [sys.executable, "-m", "benchmarks.gpu_serving", *arguments, "--answers", str(out)]
    given = [f"{name}={value}" for name, value in env.items()]
    log = out.with_suffix(".log")
    outcome = run_stage(Stage(name=out.stem, command=("env", *given, *command), timeout_s=timeout_s, grace_s=3.0), log)
    if outcome.failed:
        raise EngineError(f"{last_lines(log)}\n{outcome.name}: {outcome.status}")
    return json.loads(out.read_text(encoding="utf-8"))


def run_engines(options: argparse.Namespace, folder: Path) -> dict[str, Future[Any]]:
    """The right answers, the baseline's and those of every case, once all have ended."""
    common = ["--baseline", options.baseline, "--dtype", options.dtype, "--device", options.device]
    common += ["--model", str(folder / "model")]

    def run(side: str, case: str, name: str, env: Mapping[str, str]) -> Any:
        """One side's answers; it leaves a file and a log under its name."""
        return run_engine([case, *common, "--side", side], env, options.logs / f"{name}.json", options.timeout)

    with stage_threads(options.jobs) as engines:
        first = options.cases[0]
        begun = {name: engines.submit(run, name, first, name, {}) for name in ("baseline", "right")}
        for case in options.cases:
            begun[case] = engines.submit(run, "ours", case, case, CASES[case].env)
        wait(begun.values())
    return begun


def report(case: str, answers: Mapping[str, Future[Any]], options: argparse.Namespace) -> bool:
    """Say how the answers of a case compare, and return whether they are right."""
    for side in ("right", "baseline", case):
        if error := answers[side].exception():
            print(f"{error}\n{case}: no answers of {side}")
            return False
    right, baseline, ours = (answers[side].result() for side in ("right", "baseline", case))
    theirs, verdict = compare(right, baseline), compare(right, ours)
    most = most_error(options.dtype, theirs)
    fine = max(verdict.error, verdict.gap) <= most and not verdict.strange
    print(
        f"{case}: {verdict.equal} of {len(ours)} answers right, error {verdict.error:.4f}, other tokens "
        f"{verdict.gap:.4f} below the likeliest (at most {most:.4f}; "
        f"{options.baseline}: {theirs.equal}, {theirs.error:.4f}), {'ok' if fine else f'WRONG {verdict.strange}'}"
    )
    return fine


def serve_here(options: argparse.Namespace) -> None:
    """Answer in this process, and write the answers."""
    if options.side == "right":
        answers = right_answers(options.model)
    else:
        (name,) = options.cases
        ours = options.side == "ours"
        settings = None
        if ours:
            from benchmarks.accuracy.fixed_budget import with_fixed_predictor  # noqa: PLC0415  (imports torch)

            given = {**CASES[name].settings, "device": options.device}
            settings = with_fixed_predictor(given, 1.0, options.model, options.answers.with_suffix(".safetensors"))
        backend = "hybrid_sparse" if ours else options.baseline
        answers = answer(options.model, backend, options.dtype, settings, eager=CASES[name].eager or not ours)
    options.answers.write_text(json.dumps(answers), encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=f"among {', '.join(CASES)}")
    parser.add_argument("--baseline", default="FLASH_ATTN")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulated", "none"))
    parser.add_argument("--jobs", default=1, type=int, help="engines at a time (%(default)s)")
    parser.add_argument("--timeout", default=280, type=int, help="seconds of one engine (%(default)s)")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the engines said and answered")
    parser.add_argument("--side", choices=("baseline", "ours", "right"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs={options.jobs}: must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare some cases with the baseline."""
    options = parse_arguments(arguments)
    if options.side:
        serve_here(options)
        return 0
    if find_spec("vllm") is None:
        print("vllm is not installed")
        return NOT_INSTALLED
    stop_servers_when_terminated()  # and engines, each in its own process group
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.logs = options.logs or folder
        options.logs.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", options.dtype)
        answers = run_engines(options, folder)
        fine = [report(case, answers, options) for case in options.cases]
    print(f"serving: {sum(fine)} of {len(fine)} cases ok")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
