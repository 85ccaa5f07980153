"""Greedy answers of vLLM with hybrid_sparse, where it must be exact, against those of another backend.

    python -m benchmarks.gpu_serving CASE… [--jobs 4] [--baseline FLASH_ATTN] [--dtype bfloat16] [--device cuda]

A random Llama of four layers answers prompts from 3 to 1500 tokens, with shared beginnings, in chunks. Each engine runs
in a process of its own, `--jobs` of them at a time, the baseline's first. At half precision two backends may round to
different tokens where two are as likely: such a place is a tie, the answers are compared up to it, and it is named.
Anything else is a failure, and the exit status 1, with what the engine said last where it gave no answers; 77 where
vLLM is not installed. On a machine without a GPU: `--baseline CPU_ATTN --dtype float32 --device emulated`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import NOT_INSTALLED
from vllm_hybrid_sparse.errors import LoadError

VOCABULARY = 512
NEW_TOKENS = 24
SHOWN = 5  # most likely tokens that are kept of every place
TIES = {"bfloat16": 0.15, "float16": 0.03, "float32": 1e-3}  # log-probabilities this close may round either way
SHOWN_LINES = 40  # of the log of an engine that failed

NEARLY_ALL = 0.999999
ALL_SALIENT = 1e-9  # of HGCA's beta: every token that was given any weight
RETAINED = {"sink_tokens": 16, "window_tokens": 64}
# So that every row is one of two tiers, and the host chooses its pages.
TIERED = {**RETAINED, "policy": "dense", "device_resident_share": 0, "device_ranking": "host"}
# Rows whose pages the device chooses by itself, in a pool too small for them.
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
    # Rows that the device reads by itself, where there is room for half of the requests.
    "resident": Case(
        settings={**TIERED, "device_pool_pages": 2048, "device_resident_share": 0.8, "admission": "none"}, env={}
    ),
    "ranked": Case(settings=RANKED, env={}),
    # Scored and ordered by key codes, and read until what is dropped rounds away.
    "ranked_threshold": Case(
        settings={**RANKED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4}, env={}
    ),
    # As it is used: some rows read whole, others ranked, with the rest of the model in graphs.
    "graphs": Case(settings={**RANKED, "device_pool_pages": 2048, "device_resident_share": 0.5}, env={}, eager=False),
    "ranked_graphs": Case(
        settings={**RANKED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4},
        env={},
        eager=False,
    ),
    "small_pool": Case(settings={**TIERED, "device_pool_pages": 32, "admission": "none"}, env={}),
    "shared": Case(settings={**TIERED, "host_share": "queue"}, env={}),
    # Below 1, where the verifying kernel runs, and so near to it that what is dropped rounds away.
    "threshold": Case(
        settings={**TIERED, "policy": "progressive", "threshold": NEARLY_ALL, "microbatch_pages": 4}, env={}
    ),
    # HGCA with the window on the device and all else salient, so on the host.
    "salient": Case(settings={**RETAINED, "policy": "hgca", "hgca_beta": ALL_SALIENT}, env={}),
    # Fluxion with a predictor that asks for everything: chosen on the host, read from one queue.
    "predicted": Case(settings={**RETAINED, "policy": "fluxion", "dense_tokens": 0, "host_share": "queue"}, env={}),
    "runner_v1": Case(settings={**TIERED, "device_resident_share": 0.5}, env={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
}


@dataclass(frozen=True, slots=True)
class Place:
    """What a backend said at one place of an answer."""

    token: int
    likely: dict[int, float]  # log-probabilities of the most likely tokens


def prompts() -> list[list[int]]:
    """Token ids of the requests; the last two begin like the one before them."""
    numbers = random.Random(0)
    made = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in (3, 16, 17, 300, 1500)]
    return [*made, [*made[-1][:1024], 7, 8, 9], made[-1][:640]]


def write_model(folder: Path, dtype: str) -> None:
    """Write a random Llama whose next tokens are not all alike."""
    import torch  # noqa: PLC0415  (seconds to import; the parent process needs neither)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")):
                weight.mul_(6.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def answer(folder: Path, backend: str, dtype: str, settings: Mapping[str, Any] | None, *, eager: bool) -> list[Any]:
    """Answer every prompt in this process: for each request, `[token, [[token, log-probability], …]]` by place."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    ours = {"additional_config": {"hybrid_sparse": dict(settings)}} if settings is not None else {}
    llm = LLM(
        str(folder),
        attention_backend=backend,
        dtype=dtype,
        max_model_len=2048,
        max_num_batched_tokens=256,  # long prompts come in chunks, beside rows that decode
        gpu_memory_utilization=0.25,  # other engines may run beside this one
        kv_cache_memory_bytes=2**28,
        enforce_eager=eager,
        skip_tokenizer_init=True,
        enable_flashinfer_autotune=False,  # of kernels that are not used here, on made-up steps
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


def difference(theirs: Sequence[Place], ours: Sequence[Place], tie: float) -> tuple[str, bool]:
    """How two answers to one prompt differ, empty where they do not, and whether that is a failure."""
    for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if one.token == other.token:
            continue
        if other.token not in one.likely:
            return f"place {place}: token {other.token} is none of the baseline's {SHOWN} most likely", True
        gap = one.likely[one.token] - one.likely[other.token]
        return f"place {place}: tokens {one.token} and {other.token}, {gap:.3f} apart in the baseline", gap > tie
    return "", False


def compare(theirs: Sequence[Any], ours: Sequence[Any], tie: float) -> tuple[list[str], bool]:
    """A line for each request, and whether all of them agree but for ties."""
    lines, fine = [], True
    for request, pair in enumerate(zip(theirs, ours, strict=True)):
        one, other = ([Place(token, dict(map(tuple, likely))) for token, likely in places] for places in pair)
        text, failed = difference(one, other, tie)
        said = f"{text}, {'WRONG' if failed else 'a tie'}" if text else "equal"
        lines.append(f"request {request}: {said}")
        fine &= not failed
    return lines, fine


def run_engine(arguments: Sequence[str], env: Mapping[str, str], out: Path, timeout_s: float) -> Any:
    """Answer in a process of its own, with what it says in a `.log` beside `out`. EngineError where it does not."""
    command = [sys.executable, "-m", "benchmarks.gpu_serving", *arguments, "--answers", str(out)]
    log = out.with_suffix(".log")
    try:
        with log.open("w", encoding="utf-8") as file:
            subprocess.run(
                command,
                env=os.environ | dict(env),
                check=True,
                timeout=timeout_s,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    except subprocess.SubprocessError as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        raise EngineError("\n".join([*lines, f"{out.stem}: {error}"])) from error
    return json.loads(out.read_text(encoding="utf-8"))


def run_engines(options: argparse.Namespace, folder: Path) -> dict[str, Future[Any]]:
    """The answers of the baseline and of every case."""
    from benchmarks.accuracy.fixed_budget import with_fixed_predictor  # noqa: PLC0415  (imports torch)

    common = ["--baseline", options.baseline, "--dtype", options.dtype, "--device", options.device]
    common += ["--model", str(folder / "model")]

    def given(case: str) -> str:
        """The settings of a case; a predictor is made here, since torch's threads do not outlive an engine's fork."""
        path = options.logs / f"{case}.safetensors"
        settings = {**CASES[case].settings, "device": options.device}
        return json.dumps(with_fixed_predictor(settings, 1.0, folder / "model", path))

    with ThreadPoolExecutor(max_workers=options.jobs) as engines:
        begun = {
            "baseline": engines.submit(
                run_engine,
                [options.cases[0], *common, "--side", "baseline"],
                {},
                options.logs / "baseline.json",
                options.timeout,
            )
        }
        for case in options.cases:
            begun[case] = engines.submit(
                run_engine,
                [case, *common, "--side", "ours", "--settings", given(case)],
                CASES[case].env,
                options.logs / f"{case}.json",
                options.timeout,
            )
    return begun


def report(case: str, answers: Mapping[str, Future[Any]], options: argparse.Namespace) -> bool:
    """Say how the answers of a case compare, and return whether they agree."""
    for side in ("baseline", case):
        if error := answers[side].exception():
            print(f"{error}\n{case}: no answers of {side if side == case else options.baseline}")
            return False
    lines, fine = compare(answers["baseline"].result(), answers[case].result(), TIES[options.dtype])
    print("\n".join(f"{case}: {line}" for line in lines if not line.endswith("equal")))
    equal = sum(line.endswith("equal") for line in lines)
    print(f"{case}: {equal} of {len(lines)} answers equal to {options.baseline}, {'ok' if fine else 'WRONG'}")
    return fine


def serve_here(options: argparse.Namespace) -> None:
    """Answer in this process, and write the answers."""
    (name,) = options.cases
    case, ours = CASES[name], options.side == "ours"
    settings = None
    if ours:
        from benchmarks.accuracy.fixed_budget import with_fixed_predictor  # noqa: PLC0415  (imports torch)

        given = {**case.settings, "device": options.device}
        settings = with_fixed_predictor(given, 1.0, options.model, options.answers.with_suffix(".safetensors"))
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = (
            "spawn"  # torch has computed here: its threads don't outlive a fork
        )
    backend = "hybrid_sparse" if ours else options.baseline
    answers = answer(options.model, backend, options.dtype, settings, eager=case.eager or not ours)
    options.answers.write_text(json.dumps(answers), encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=f"among {', '.join(CASES)}")
    parser.add_argument("--baseline", default="FLASH_ATTN")
    parser.add_argument("--dtype", default="bfloat16", choices=TIES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulated", "none"))
    parser.add_argument("--jobs", default=1, type=int, help="engines at a time (%(default)s)")
    parser.add_argument("--timeout", default=280.0, type=float, help="seconds of one engine (%(default)s)")
    parser.add_argument("--logs", type=Path, help="folder that keeps what the engines said and answered")
    parser.add_argument("--side", choices=("baseline", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
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
