"""Time per output token on a GPU: everything on the device, and hybrid_sparse with a device pool too small for it.

    python -m benchmarks.gpu_timing [--cases 8Kx1,32Kx4] [--sides baseline,resident,hybrid] [--device-gib 4]

A random model of Llama-3.1-8B's shape decodes over contexts that vLLM's DecodeBenchConnector fills with random numbers,
so no prompt is computed. Attention to random keys is nearly flat, and a threshold would read all of it: time fixed
budgets this way, and thresholds on a real `--model` with `--computed` prompts. Each side is an engine in a process of
its own that goes through all cases, shortest first. A side that fails or runs out of time leaves the rounds it had.
Ratios are to the baseline, `fixed` and `hybrid`, from one run.

Two sides read 5 % by Quest's bounds. `fixed` loads pages on demand and attends to them on the GPU, with a part of the
pool for each layer (Fluxion, section 2.2, GPU-only). `hybrid` is Fluxion's own baseline, w/o Fluxion (16, 0.05) of its
section 8.1: the device attends to the retained set, the host to all else, and each head has its own 5 %, of which the
group reads the union. It is policy `fluxion` with one budget for every head, so it also pays for a prediction that is
always the same, and for an anchor behind the prompt and every 256 tokens, more than are timed by default.

`offload` is vLLM's own way with contexts that do not fit: the baseline's attention, `--device-gib` of KV on the device
and the rest offloaded to host memory. A request's KV must come back as a whole before the request runs. So requests
that do not fit together run one after another, and `offload` is compared by the rate over a whole round. It gets only
the cases of which a single request fits.

On a machine without a GPU: `--device emulated --baseline CPU_ATTN --layers 2 --hidden 256 --device-gib 0.01`.
"""

import argparse
import contextlib
import fcntl
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import NOT_INSTALLED, Stage, find_gpu, last_lines, run_stage, stage_threads
from benchmarks.gpu_timing_rows import (
    BASELINE,
    FIXED,
    HYBRID,
    OFFLOAD,
    WARM_UP_TOKENS,
    Case,
    Json,
    counters,
    differences,
    parse_case,
    summarise,
    table,
    together,
    whole_round,
)
from benchmarks.gpu_trace import busy, read_events
from benchmarks.kv_shape import KVShape, read_shape
from benchmarks.report import save
from benchmarks.serving.backends import FILLING_CONNECTOR, stop_servers_when_terminated
from vllm_hybrid_sparse.settings import CUDA_RESIDENT_SHARE
from vllm_hybrid_sparse.values import PAGE_TOKENS

TIERED = {"device_resident_share": 0, "device_ranking": "host"}
RANKED = {"device_resident_share": 0, "device_ranking": "device"}
LAUNCHED = "launched"
SIDES: dict[str, dict[str, Any] | None] = {
    BASELINE: None,  # vLLM's, everything on the device
    OFFLOAD: None,  # vLLM's, what does not fit in host memory
    # Ours as in normal use: the device alone reads a request that fits, and ranks the pages of the others.
    "resident": {
        "policy": "topk",
        "topk_ratio": 0.05,
        "device_resident_share": CUDA_RESIDENT_SHARE,
        "device_ranking": "device",
    },
    "ranked": {"policy": "topk", "topk_ratio": 0.05, **RANKED},
    "ranked_threshold": {"policy": "progressive", "threshold": 0.95, **RANKED},
    # As `ranked`, but every kernel is launched from Python, and no step is prepared during the one before it.
    LAUNCHED: {"policy": "topk", "topk_ratio": 0.05, **RANKED, "device_graphs": "off"},
    # In the sides below all rows are two-tier rows, and the host chooses their pages.
    "dense": {"policy": "dense", **TIERED},
    # Pages are loaded on demand and attended on the device.
    FIXED: {"policy": "topk", "topk_ratio": 0.05, "summary": "minmax", "device_pool": "per_layer"},
    # Fluxion's baseline: the host attends to what lies outside the window, 5 % of it for each head.
    HYBRID: {
        "policy": "fluxion",
        "summary": "minmax",
        "granularity": PAGE_TOKENS,
        "dense_tokens": 0,
        "host_share": "all",
    },
    # PSA as in its paper: ArkVale's cuboids, its rule for what is unread, one pool for all layers, LRU.
    "psa": {
        "policy": "progressive",
        "threshold": 0.95,
        "summary": "cuboid_mean",
        "remainder": "lightest_page",
        "device_eviction": "lru",
        **TIERED,
    },
    "topk": {"policy": "topk", "topk_ratio": 0.05, **TIERED},
    "static": {"policy": "topk", "topk_ratio": 0.05, "host_share": "uniform", **TIERED},  # split as HGCA splits
    "queue": {"policy": "topk", "topk_ratio": 0.05, "host_share": "queue", **TIERED},  # Fluxion's queue for both
    # HGCA: the window on the device, salient tokens on the host. With random keys few tokens stand out.
    "hgca": {"policy": "hgca", "window_tokens": 2048},
    # Fluxion with one budget for every head: random weights cannot teach which heads need how much.
    "fluxion": {"policy": "fluxion", "host_share": "queue"},
    "threshold": {"policy": "progressive", "threshold": 0.95, **TIERED},
}
DEVICE_SETTINGS = (
    "device_pool",
    "device_eviction",
    "device_resident_share",
    "device_ranking",
    "device_graphs",
    "host_share",
)  # those that need a device
QUICK_CONNECTOR = FILLING_CONNECTOR | {"kv_connector_module_path": "benchmarks.serving.quick_fill"}
FLUXION_BUDGET = 0.05  # share of the candidates, for every head
DEFAULT_SIDES = (BASELINE, "resident", "ranked", HYBRID, FIXED, "topk", "queue")
DEFAULT_CASES = "8Kx1,8Kx32,32Kx4,128Kx1,128Kx4"
BF16_BYTES = 2
OVERLAPPED_SHARE = 0.9  # of the GPU's memory, for all sides
PROFILED_TOKENS = 6
_SPARE = 1.15  # factor on the KV bytes, for summaries and partly filled blocks
_SPARE_TOKENS = 256  # for partly filled blocks, and one that vLLM keeps to itself


def pool_pages(shape: KVShape, device_gib: float) -> int:
    """Page slots (K and V of 16 tokens of a KV head, BF16) that this much device memory holds."""
    return int(device_gib * 2**30) // (2 * PAGE_TOKENS * shape.head_dim * BF16_BYTES)


def fitting(options: argparse.Namespace, cases: Sequence[Case]) -> list[Case]:
    """The cases of which a single request fits `--device-gib`. Raises ValueError if there are none."""
    tokens = int(options.device_gib * 2**30) // read_shape(options.folder).token_bytes(BF16_BYTES)
    found = [case for case in cases if longest_tokens(options, [case]) + _SPARE_TOKENS <= tokens]
    if not found:
        raise ValueError(f"--device-gib={options.device_gib:g}: holds {tokens} tokens, fewer than any case has")
    return found


def longest_tokens(options: argparse.Namespace, cases: Sequence[Case]) -> int:
    """The length that a request may reach."""
    return max(case.context_tokens for case in cases) + options.tokens + 2 * WARM_UP_TOKENS


def engine_arguments(options: argparse.Namespace, cases: Sequence[Case]) -> Json:
    """The arguments that all sides start with."""
    longest = longest_tokens(options, cases)
    room = max((case.context_tokens + options.tokens + 1024) * case.requests for case in cases)
    token_bytes = read_shape(options.folder).token_bytes(BF16_BYTES)
    arguments: Json = {
        "model": str(options.folder),
        "dtype": "bfloat16",
        "max_model_len": longest,
        "max_num_seqs": max(case.requests for case in cases),
        "kv_cache_memory_bytes": int(max(room, longest) * token_bytes * _SPARE),
        "hf_overrides": {"max_position_embeddings": longest},
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # our backend's counters are taken from them
        "enable_flashinfer_autotune": False,
        "seed": 0,
    }
    if options.overlap:
        arguments["gpu_memory_utilization"] = OVERLAPPED_SHARE / len(options.sides.split(","))
    if options.model is None:
        arguments["load_format"] = "dummy"
    if not options.computed:
        arguments["kv_transfer_config"] = QUICK_CONNECTOR
    return arguments


def offload_arguments(options: argparse.Namespace, common: Json) -> Json:
    """vLLM's offloading to as much host memory as the others' KV caches have; the filling connector comes after it."""
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": common["kv_cache_memory_bytes"]},
    }
    connectors = [offloading, *([] if options.computed else [QUICK_CONNECTOR])]
    return {
        "attention_backend": options.baseline,
        "kv_cache_memory_bytes": int(options.device_gib * 2**30),
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    }


def side_arguments(side: str, options: argparse.Namespace, common: Json) -> Json:
    """The arguments that one side adds: vLLM's backend, or ours with a pool of `--device-gib`.

    common   the arguments of all sides, from `engine_arguments`
    """
    settings = SIDES[side]
    if side == OFFLOAD:
        return offload_arguments(options, common)
    if settings is None:
        return {"attention_backend": options.baseline}
    settings = {**settings, "device": options.device, "log_interval_s": 10}
    if options.device != "cuda":
        settings.pop("device_graphs", None)
    if options.device != "none":
        settings["device_pool_pages"] = pool_pages(read_shape(options.folder), options.device_gib)
    else:
        settings = {name: value for name, value in settings.items() if name not in DEVICE_SETTINGS}
    from benchmarks.accuracy.fixed_budget import with_fixed_predictor  # noqa: PLC0415  (seconds to import)

    settings = with_fixed_predictor(settings, FLUXION_BUDGET, options.folder, options.rows.with_suffix(".safetensors"))
    arguments: Json = {"attention_backend": "hybrid_sparse", "additional_config": {"hybrid_sparse": settings}}
    return arguments | ({"async_scheduling": False} if side == LAUNCHED else {})


def write_config(folder: Path, layers: int, hidden: int) -> None:
    """Write the configuration of a Llama with the heads of Llama-3.1-8B; vLLM makes up its weights."""
    from transformers import LlamaConfig  # noqa: PLC0415  (seconds to import)

    LlamaConfig(
        vocab_size=32768,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def serve_side(side: str, options: argparse.Namespace, cases: Sequence[Case], out: Path) -> None:
    """Run all cases in this process's engine; add a line to `out` after each round of each."""
    from prometheus_client import REGISTRY, generate_latest  # noqa: PLC0415
    from vllm import LLM  # noqa: PLC0415  (only where an engine runs)

    if side == OFFLOAD:
        cases = fitting(options, cases)
    common = engine_arguments(options, cases)
    profiled = side in options.profile.split(",")
    if profiled:
        folder = str(out.with_suffix(".trace"))
        common["profiler_config"] = {
            "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False
        }  # fmt: skip
    llm = LLM(**(common | side_arguments(side, options, common)))
    before = counters(generate_latest(REGISTRY).decode())
    for case in sorted(cases):
        with alone(options.turn):
            for round_ in range(options.rounds + 1):  # the first warms the pool and compiles
                timed = time_round(llm.llm_engine, case, options.tokens, f"{case.name}-{round_}", apart=side == OFFLOAD)
                after = counters(generate_latest(REGISTRY).decode())
                row = {"side": side, "case": case.name, "round": round_, **timed, **differences(before, after)}
                before = after
                append(out, row)
    if profiled:
        with alone(options.turn):
            llm.start_profile()
            time_round(llm.llm_engine, max(cases), PROFILED_TOKENS, "profiled", apart=side == OFFLOAD)
            llm.stop_profile()
        append(out, {"side": side, "case": max(cases).name, "round": 0, **traced(out.with_suffix(".trace"))})


def append(out: Path, row: Json) -> None:
    """Keep a row at once: the side may be cut off."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def traced(folder: Path) -> Json:
    """What a trace says about the GPU's time; empty if it says nothing, as on a machine without a GPU."""
    for path in folder.glob("*.json.gz"):
        with contextlib.suppress(ValueError):
            found = busy(read_events(path))
            return {"traced_step_ms": found.step_us / 1e3, "traced_idle": found.idle}
    return {}


@contextmanager
def alone(turn: Path | None) -> Iterator[None]:
    """Keep all other sides of the run from computing meanwhile.

    turn   a file that all sides lock in turn; None if there is only one side at a time
    """
    if turn is None:
        yield
        return
    with turn.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_round(engine: Any, case: Case, tokens: int, name: str, *, apart: bool) -> dict[str, float]:
    """Answer the requests of a case.

    apart     whether they may run one after another; otherwise they must run side by side
    returns   step_ms, the mean time between a request's tokens, and tokens_per_s of all requests, both while all of
              them decode, and left out if they never do; round_tokens_per_s, over the whole round
    """
    from vllm import SamplingParams  # noqa: PLC0415

    sampling = SamplingParams(temperature=0, max_tokens=tokens + WARM_UP_TOKENS, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    for request in range(case.requests):
        engine.add_request(f"{name}-{request}", {"prompt_token_ids": [3 + request] * case.context_tokens}, sampling)
    came: dict[str, list[tuple[float, int]]] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            came.setdefault(output.request_id, []).append((now_s, len(output.outputs[0].token_ids)))
    every = list(came.values())
    try:
        figures = together(every)
    except ValueError:
        if not apart:
            raise
        figures = {}
    return figures | whole_round(every, began_s)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=DEFAULT_CASES, help="CONTEXTKxREQUESTS, comma-separated (%(default)s)")
    parser.add_argument("--sides", default=",".join(DEFAULT_SIDES), help=f"among {', '.join(SIDES)} (%(default)s)")
    parser.add_argument("--baseline", default="FLASH_ATTN", help="backend of vLLM (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulated", "none"), help="of our sides")
    parser.add_argument("--device-gib", default=4.0, type=float, help="page slots of our sides' pool (%(default)s)")
    parser.add_argument("--layers", default=32, type=int, help="of the random model")
    parser.add_argument("--hidden", default=4096, type=int, help="its hidden size")
    parser.add_argument("--model", type=Path, help="a folder with weights instead of the random model")
    parser.add_argument("--computed", action="store_true", help="compute prompts instead of filling the KV cache")
    parser.add_argument("--tokens", default=32, type=int, help="of each answer that are timed")
    parser.add_argument("--rounds", default=3, type=int, help="timed after one that is not")
    parser.add_argument("--side-timeout", default=270, type=int, help="seconds of one side")
    parser.add_argument("--out", type=Path, help="result file instead of a new one in benchmarks/results")
    parser.add_argument("--logs", type=Path, help="folder that keeps what sides say, and rounds as they come")
    parser.add_argument("--profile", default="", help="sides of which a trace of some steps is left in --logs")
    parser.add_argument("--overlap", action="store_true", help="start all sides at once, and time them in turns")
    parser.add_argument("--turn", type=Path, help="a file that is locked meanwhile, for several runs at once")
    parser.add_argument("--run-side", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for side in options.sides.split(","):
        if side not in SIDES:
            parser.error(f"--sides={side}: must be among {', '.join(SIDES)}")
    for name, least in (("tokens", 2), ("rounds", 1), ("layers", 1), ("hidden", 1), ("side_timeout", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: must be at least {least}")
    if options.device_gib <= 0:
        parser.error(f"--device-gib={options.device_gib:g}: must be above 0")
    try:
        options.parsed = [parse_case(name) for name in options.cases.split(",")]
    except ValueError as error:
        parser.error(f"--{error}")
    return options


def run_side(side: str, given: Sequence[str], options: argparse.Namespace, out: Path) -> tuple[list[Json], str]:
    """Time one side in a process of its own; return the rounds that it finished, and how it ended."""
    rows = out / f"{side}.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_timing", *given, "--run-side", side, "--rows", str(rows)]
    command += ["--folder", str(options.folder)]
    if options.overlap:
        command += ["--turn", str(options.turn or out / "turn")]
    log = out / f"{side}.log"
    stage = Stage(name=side, command=tuple(command), timeout_s=options.side_timeout, grace_s=3.0)
    outcome = run_stage(stage, log)
    if outcome.failed:
        print(last_lines(log))
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.is_file() else []
    return [json.loads(line) for line in lines], outcome.status


def run_sides(given: Sequence[str], options: argparse.Namespace, out: Path) -> Iterator[tuple[str, list[Json], str]]:
    """Each side as it ends, with what `run_side` returns; sides run one after another or, with --overlap, at once."""
    sides = options.sides.split(",")
    with stage_threads(len(sides) if options.overlap else 1) as starts:
        ends = {starts.submit(run_side, side, given, options, out): side for side in sides}
        for ended in as_completed(ends):
            yield (ends[ended], *ended.result())


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all sides, print the table after each, keep the result; return 1 if one did not finish."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(given)
    stop_servers_when_terminated()  # and sides, each in its own process group
    if options.run_side:
        serve_side(options.run_side, options, options.parsed, options.rows)
        return 0
    if find_spec("vllm") is None:
        print("vllm is not installed")
        return NOT_INSTALLED
    rounds: list[Json] = []
    ends: dict[str, str] = {}
    path: Path | None = options.out
    with tempfile.TemporaryDirectory(prefix="gpu-timing-") as name:
        options.folder = options.model or Path(name) / "model"
        if options.model is None:
            write_config(options.folder, options.layers, options.hidden)
        logs = options.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        for side, made, end in run_sides(given, options, logs):
            rounds += made
            ends[side] = end
            rows = summarise(rounds)
            content = {"ends": ends, "gpu": find_gpu(), "device": options.device, "device_gib": options.device_gib}
            path = save("gpu-timing", {**content, "rows": rows, "rounds": rounds}, path)
            print(table(rows, options.baseline), flush=True)
    print(f"{', '.join(f'{side}: {end}' for side, end in ends.items())}; kept in {path.name if path else 'no file'}")
    return 0 if set(ends.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
