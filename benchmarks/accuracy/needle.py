"""Which needles in long texts each policy and stock vLLM find: SmolLM2 through the HTTP server.

    python -m benchmarks.accuracy.needle [--text PATH] [--policies stock,default,topk-minmax] [--lengths 1024,7680]

Servers run one after another. Exits with 1 if the default settings miss a needle that stock vLLM finds.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from tokenizers import Tokenizer

from benchmarks.accuracy.needle_prompts import ANSWER_TOKENS, CONTEXT_TOKENS, NeedlePrompt, make_needle_prompts
from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import (
    DTYPES,
    START_TIMEOUT_S,
    our_args,
    serve_args,
    stop_servers_when_terminated,
    thread_env,
)
from benchmarks.serving.streams import stream_all
from vllm_hybrid_sparse.cli.kv_read import share_of_kv_read
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir

MODEL_TOKENS = 8192  # more if a prompt and its answer need it
POLICIES: dict[str, dict[str, object] | None] = {
    "stock": None,
    "default": {},
    "dense": {"policy": "dense"},
    "topk": {"policy": "topk", "topk_ratio": 0.05},
    "progressive-minmax": {"policy": "progressive", "threshold": 0.95, "summary": "minmax", "microbatch_pages": 64},
    "progressive-cuboid": {
        "policy": "progressive",
        "threshold": 0.95,
        "summary": "cuboid_mean",
        "microbatch_pages": 64,
    },
    "topk-minmax": {"policy": "topk", "topk_ratio": 0.05, "summary": "minmax"},
    "topk-cuboid": {"policy": "topk", "topk_ratio": 0.05, "summary": "cuboid_mean"},
}


class PolicyResult(TypedDict):
    """What one policy answered, prompt by prompt."""

    policy: str
    settings: dict[str, object] | None  # None: stock vLLM
    found: list[bool]
    answers: list[str]
    share_read: float | None  # of the KV bytes, in decode steps


def ask(server: Server, tokenizer: Tokenizer, prompts: Sequence[NeedlePrompt]) -> list[str]:
    """Return the model's answers, one prompt after another."""
    answers = []
    for number, prompt in enumerate(prompts, start=1):
        begun_s = time.monotonic()
        (stream,) = stream_all(server, [prompt.token_ids], ANSWER_TOKENS)
        answers.append(tokenizer.decode(list(stream.token_ids)))
        print(
            f"    {number}/{len(prompts)}: {len(prompt.token_ids)} tokens, depth {prompt.depth}: {answers[-1]!r} "
            f"for {prompt.fact.number}, {time.monotonic() - begun_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return answers


def measure(
    policy: str,
    settings: dict[str, object] | None,
    model: Path,
    tokenizer: Tokenizer,
    prompts: Sequence[NeedlePrompt],
    dtype: str,
    log_path: Path,
) -> PolicyResult:
    """Serve stock vLLM (None) or ours with `settings`, ask everything and return what was found."""
    longest = max(MODEL_TOKENS, *(len(prompt.token_ids) + ANSWER_TOKENS for prompt in prompts))
    args = [*serve_args(model, longest, longest + 1024, filled=False, dtype=dtype), "--enforce-eager"]
    if settings is not None:
        args += our_args(settings)
    with Server(model, args, thread_env("all"), log_path) as server:
        server.wait_ready(START_TIMEOUT_S)
        answers = ask(server, tokenizer, prompts)
        share_read = share_of_kv_read(server.metrics())
    found = [prompt.fact.found_in(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return {"policy": policy, "settings": settings, "found": found, "answers": answers, "share_read": share_read}


def show(prompts: Sequence[NeedlePrompt], results: Sequence[PolicyResult], lengths: Sequence[int]) -> str:
    """Return a table of needles found by policy and length."""
    rows = []
    for result in results:
        found = result["found"]
        row = [result["policy"]]
        for length in lengths:
            hits = [hit for prompt, hit in zip(prompts, found, strict=True) if len(prompt.token_ids) == length]
            row.append(f"{sum(hits)} of {len(hits)}")
        share = result["share_read"]
        rows.append([*row, f"{sum(found)} of {len(found)}", "" if share is None else f"{share:.0%}"])
    header = ["policy", *(f"{length} tokens" for length in lengths), "all", "KV bytes read, decoding"]
    return markdown_table(header, rows)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=None, type=Path, help="text file to hide in, instead of generated prose")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated")
    parser.add_argument("--also", default=[], action="append", type=json.loads, help="JSON settings of one more row")
    parser.add_argument("--lengths", default=",".join(map(str, CONTEXT_TOKENS)), help="tokens, comma-separated")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of all servers (%(default)s)")
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    return parser.parse_args()


def main() -> int:
    """Ask every policy, print the table, keep the result; return 1 if the default loses a needle to stock."""
    options = parse_arguments()
    stop_servers_when_terminated()
    lengths = tuple(int(length) for length in options.lengths.split(","))
    model = options.model or model_dir()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = make_needle_prompts(tokenizer, options.text, lengths)
    asked = {policy: POLICIES[policy] for policy in options.policies.split(",") if policy}
    asked |= {json.dumps(settings): settings for settings in options.also}
    results = []
    with tempfile.TemporaryDirectory(prefix="needle-") as folder:
        for number, (policy, settings) in enumerate(asked.items()):
            print(policy, file=sys.stderr, flush=True)
            log_path = Path(folder) / f"{number}.log"
            results.append(measure(policy, settings, model, tokenizer, prompts, options.dtype, log_path))
    print(show(prompts, results, lengths))
    tasks = [
        {"tokens": len(prompt.token_ids), "depth": prompt.depth, "needle": prompt.fact.number} for prompt in prompts
    ]
    text = options.text.name if options.text else "generated prose"
    content = {"text": text, "dtype": options.dtype, "tasks": tasks, "results": results}
    print(f"kept in {save('needle', content)}", file=sys.stderr)
    found = {result["policy"]: result["found"] for result in results}
    lost = [
        task
        for task, stock, ours in zip(tasks, found.get("stock", []), found.get("default", []), strict=False)
        if stock and not ours  # both were asked
    ]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
