"""How stock vLLM and ours are started for a measurement: the same except for the attention backend."""

import json
import signal
import sys
from pathlib import Path

from benchmarks.kv_shape import read_shape
from vllm_hybrid_sparse.cli.server import Server, core_list
from vllm_hybrid_sparse.glue.cpu_threads import SPIN_COUNT, SPIN_COUNT_VARIABLE

START_TIMEOUT_S = 900  # the first start compiles
DTYPES = {"bfloat16": 2, "float32": 4}  # bytes a number
KV_BYTES = {**DTYPES, "fp8": 1.2}  # fp8: key codes stay as large, so they take a larger part
_SPARE = 1.15  # summaries and partly filled blocks
FILLING_CONNECTOR = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "fill_mean": 0.0,
        "fill_std": 1.0,
        "startup_fill": True,
    },  # 0 would make all pages alike
}
"""The KV connector of vLLM that fills the KV cache, once, instead of computing prompts."""


def thread_env(threads: str) -> dict[str, str]:
    """Return the environment of a thread setting: `all` cores, vLLM's `default` binding, or a core list.

    If cores are named, stock vLLM's threads also wait in the way of our backend's: that is faster.
    """
    if threads == "default":
        return {}
    bound = core_list() if threads == "all" else threads
    return {"VLLM_CPU_OMP_THREADS_BIND": bound, SPIN_COUNT_VARIABLE: SPIN_COUNT}


def serve_args(model: Path, model_tokens: int, cached_tokens: int, filled: bool, dtype: str = "bfloat16") -> list[str]:
    """Return the arguments that both sides start with.

    model           folder of the served model
    model_tokens    longest request
    cached_tokens   room of the KV cache
    filled          let vLLM's DecodeBenchConnector fill the KV cache, once, instead of computing prompts
    dtype           of weights, KV cache and arithmetic: a key of `DTYPES`
    """
    args = [
        f"--dtype={dtype}",
        f"--max-model-len={model_tokens}",
        f"--hf-overrides={json.dumps({'max_position_embeddings': model_tokens})}",
        kv_memory_arg(model, cached_tokens, dtype),
    ]
    if filled:
        args.append(f"--kv-transfer-config={json.dumps(FILLING_CONNECTOR)}")
    return args


def kv_memory_arg(model: Path, cached_tokens: int, dtype: str) -> str:
    """Return the option for the memory of a KV cache of `cached_tokens`, stored in `dtype`: a key of `KV_BYTES`."""
    return f"--kv-cache-memory-bytes={int(cached_tokens * read_shape(model).token_bytes(1) * KV_BYTES[dtype] * _SPARE)}"


def our_args(settings: dict[str, object], kv_cache_dtype: str = "auto") -> list[str]:
    """Return the arguments that choose our backend; the KV cache is as wide as the model, or narrower."""
    return [
        "--attention-backend=hybrid_sparse",
        f"--additional-config={json.dumps({'hybrid_sparse': settings})}",
        f"--kv-cache-dtype={kv_cache_dtype}",
    ]


def make_pair(
    model: Path, args: list[str], our_options: list[str], threads: str, log_folder: Path
) -> dict[str, Server]:
    """Return the two servers, not started, by the name of the side."""
    env = thread_env(threads)
    return {
        "stock": Server(model, args, env, log_folder / "stock.log"),
        "ours": Server(model, [*args, *our_options], env, log_folder / "ours.log"),
    }


def stop_servers_when_terminated() -> None:
    """Make SIGTERM end this process by an exception, so that servers in `with` blocks are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
