"""Engine runs in a child process: what is asked of it and what comes back.

job      {"name": …, "engine_args": {… of vllm.LLM}, "prompts": [[token ids]], "max_tokens": n, "margins": bool,
          "blocks": bool, "entered": bool, "counters": [names of vLLM's],
          "adapter": path of a LoRA adapter, which every second prompt is answered with}
result   {"name": …, "answers": [{"token_ids": […], "margins": […]}]}, with "blocks": {"full": n, "stale": n},
         "entered": n (blocks of the device pool) and "counters": [values] where asked for, or
         {"name": …, "error": "… with its causes"}
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.completions import Answer

# Engine arguments: requests run side by side, in chunks, and find each other's prefixes.
CROWD: dict[str, Any] = {"max_num_batched_tokens": 200, "max_num_seqs": 16, "enable_prefix_caching": True}
MARK = "RESULT "  # what `engine_child` begins its result lines with
MANY_ENGINES_S = 1800  # for a list of jobs, on a machine that has other work, too


def alone(max_model_tokens: int) -> dict[str, Any]:
    """Engine arguments: one request at a time, each prompt as a whole and without a prefix cache."""
    return {"max_num_batched_tokens": max_model_tokens, "max_num_seqs": 1, "enable_prefix_caching": False}


def jobs_beside_stock(
    family: str, shared: dict[str, Any], settings: dict[str, dict[str, Any]], task: dict[str, Any], **ours: Any
) -> list[dict[str, Any]]:
    """Jobs of one task: "FAMILY stock" one request at a time; "FAMILY NAME", ours in a crowd, for each of `settings`.

    shared   engine arguments of all, with the model and max_model_len
    ours     further ones of our engines
    """
    jobs = [{"name": f"{family} stock", "engine_args": shared | alone(shared["max_model_len"]), **task}]
    ours = {"attention_backend": "hybrid_sparse", "block_size": 16, **ours}
    for name, chosen in settings.items():
        engine_args = shared | CROWD | ours | {"additional_config": {"hybrid_sparse": chosen}}
        jobs.append({"name": f"{family} {name}", "engine_args": engine_args, **task})
    return jobs


def run_jobs(
    jobs: Sequence[dict[str, Any]], log_path: Path, timeout_s: float = MANY_ENGINES_S, threads: int | None = None
) -> dict[str, dict[str, Any]]:
    """Run `jobs` in a child process, by default with a thread a core, and return the results by name.

    Raises RuntimeError if one is missing.
    """
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in the child itself
        "OMP_NUM_THREADS": str(threads or len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "passive",
    }
    with log_path.open("wb") as log:
        child = subprocess.run(
            [sys.executable, "-m", "tests.system.engine_child"],
            input=json.dumps(jobs).encode(),
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            timeout=timeout_s,
            check=False,
        )
    lines = child.stdout.decode(errors="replace").splitlines()
    results = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    missing = {job["name"] for job in jobs} - {result["name"] for result in results}
    if missing:
        tail = log_path.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise RuntimeError(
            f"no result for {sorted(missing)}, status {child.returncode}; the end of {log_path}:\n{tail}"
        )
    return {result["name"]: result for result in results}


def answers_of(result: dict[str, Any]) -> list[Answer]:
    """Return the answers of one job in the order of its prompts; fails with the engine's error if it has one."""
    assert "error" not in result, result["error"]
    return [Answer(tuple(answer["token_ids"]), tuple(answer["margins"])) for answer in result["answers"]]
