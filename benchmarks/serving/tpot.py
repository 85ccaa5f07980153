"""Time per output token and to the first token, stock vLLM and ours in turns on the same prompts: `make bench`.

    python -m benchmarks.serving.tpot [--cases 8Kx1,32Kx1] [--policies topk,dense,default] [--full]

Both servers of a pair run at the same time and are asked in turns, so one is idle while the other works. Times are
those that the streaming client sees. Exits with 1 if a bar is missed.
"""

import argparse
import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypedDict

from tokenizers import Tokenizer

from benchmarks.report import markdown_table, save, spread
from benchmarks.serving.backends import (
    DTYPES,
    START_TIMEOUT_S,
    kv_memory_arg,
    make_pair,
    our_args,
    serve_args,
    stop_servers_when_terminated,
)
from benchmarks.serving.cases import POLICIES, TTFT_BAR, Case, Samples, select_cases
from benchmarks.serving.streams import stream_all, token_gaps_ms
from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir

WARM_UP_TOKENS = 4  # of every stream, not counted
SIDES = ("stock", "ours")

Key = tuple[str, str, str, str]  # case, policy, threads, side
Prompts = Callable[[Case, int], list[list[int]]]


class Row(TypedDict):
    """One figure of a case and policy, each side at its best thread setting."""

    case: str
    policy: str
    figure: str  # tpot_ms or ttft_ms
    stock: dict[str, float]  # a `spread`
    stock_threads: str
    ours: dict[str, float]
    our_threads: str
    stock_over_ours: float
    bar: float | None
    passed: bool | None


def say(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def prompt_source(model: Path) -> Prompts:
    """Return a function that makes a case's prompts for one round: the same each time, other prose every round."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def prompts(case: Case, round_: int) -> list[list[int]]:
        made = []
        for request in range(case.requests):
            if case.filled:  # the tokens are never computed
                made.append([3 + round_] * case.context_tokens)
                continue
            seed = zlib.crc32(f"{case.name} {request} {round_ if case.fresh else 0}".encode())
            text = " ".join(prose(case.context_tokens // 12, seed))
            made.append(tokenizer.encode(text, add_special_tokens=False).ids[: case.context_tokens])
        return made

    return prompts


def measure_case(pair: dict[str, Server], case: Case, prompts: Prompts, tokens: int) -> dict[str, Samples]:
    """Ask both servers in turns, the first alternating, and return the samples of each side."""
    samples = {side: Samples() for side in SIDES}
    for round_ in range(case.rounds + (0 if case.fresh else 1)):
        asked = prompts(case, round_)
        filling = not case.fresh and round_ == 0  # fills the prefix cache for the rounds to come
        for side in SIDES if round_ % 2 == 0 else reversed(SIDES):
            streams = stream_all(pair[side], asked, tokens + WARM_UP_TOKENS)
            if filling:
                continue
            samples[side].tpot_ms += token_gaps_ms(streams, WARM_UP_TOKENS)
            if case.fresh and not case.filled:
                samples[side].ttft_ms += [stream.ttft_ms for stream in streams]
        if filling:
            say(f"    {case.name}: prompts computed, the rounds repeat them")
            continue
        medians = ", ".join(f"{side} {spread(samples[side].tpot_ms)['p50']:.1f} ms" for side in SIDES)
        say(f"    {case.name} round {round_ + (1 if case.fresh else 0)}: {medians} a token")
    return samples


def room_tokens(cases: list[Case]) -> int:
    """Return the tokens that cases sharing servers need room for: their requests, and the longest that is allowed."""
    return max(cases[0].model_tokens, *(case.context_tokens * case.requests + 2048 for case in cases))


def measure_pair(
    cases: list[Case],
    settings: dict[str, object],
    threads: str,
    model: Path,
    tokens: int,
    dtype: str,
    kv_cache_dtype: str,
) -> dict[str, dict[str, Samples]]:
    """Start both servers for cases that can share them, measure the cases, and stop the servers."""
    args = serve_args(model, cases[0].model_tokens, room_tokens(cases), cases[0].filled, dtype)
    our_options = our_args(settings, kv_cache_dtype)
    if kv_cache_dtype != "auto":
        our_options.append(kv_memory_arg(model, room_tokens(cases), kv_cache_dtype))
    prompts = prompt_source(model)
    with tempfile.TemporaryDirectory(prefix="tpot-") as folder, ExitStack() as stack:
        pair = make_pair(model, args, our_options, threads, Path(folder))
        for server in pair.values():
            stack.enter_context(server)
            say(f"    server ready after {server.wait_ready(START_TIMEOUT_S):.0f} s")
        warm_up = [[3 + index % 100 for index in range(cases[0].context_tokens // 8)]]
        for server in pair.values():
            stream_all(server, warm_up, 2 * WARM_UP_TOKENS)
        return {case.name: measure_case(pair, case, prompts, tokens) for case in cases}


def sharing(case: Case) -> tuple[int, bool, tuple[str, ...]]:
    """Return what cases must have in common to share servers."""
    return case.model_tokens, case.filled, case.threads


def groups(cases: list[Case], threads: str) -> Iterator[tuple[str, list[Case]]]:
    """Yield the cases that can share servers, with each thread setting to try for them."""
    for _, members in itertools.groupby(sorted(cases, key=sharing), key=sharing):
        together = list(members)
        for setting in threads.split(";") if threads else together[0].threads:
            yield setting, together


def best(samples: dict[Key, Samples], case: str, policy: str, side: str, what: str) -> tuple[str, dict[str, float]]:
    """Return the thread setting with the lowest median of `what` (tpot_ms or ttft_ms), and its spread.

    A setting without samples counts only if none has any.
    """
    found = {
        threads: spread(getattr(value, what))
        for (name, policy_, threads, side_), value in samples.items()
        if (name, policy_, side_) == (case, policy, side)
    }
    return min(found.items(), key=lambda item: (not item[1]["values"], item[1]["p50"]))


def summarise(samples: dict[Key, Samples], cases: list[Case], policies: list[str]) -> list[Row]:
    """Return one row for every figure of a case and policy that was measured, each side at its best thread setting."""
    rows: list[Row] = []
    measured = {(name, policy) for name, policy, _, _ in samples}
    for case, policy, what in itertools.product(cases, policies, ("tpot_ms", "ttft_ms")):
        if (case.name, policy) not in measured:
            continue
        stock_threads, stock = best(samples, case.name, policy, "stock", what)
        our_threads, ours = best(samples, case.name, policy, "ours", what)
        if what == "ttft_ms" and not stock["values"]:
            continue  # its prompts are not computed; a tpot that could not be measured misses its bar
        ratio = stock["p50"] / ours["p50"]
        bar = case.bar(policy) if what == "tpot_ms" else TTFT_BAR
        rows.append(
            {
                "case": case.name,
                "policy": policy,
                "figure": what,
                "stock": stock,
                "stock_threads": stock_threads,
                "ours": ours,
                "our_threads": our_threads,
                "stock_over_ours": ratio,
                "bar": bar,
                "passed": None if bar is None else ratio >= bar,
            }
        )
    return rows


def show(rows: list[Row]) -> str:
    """Return the rows as a table."""

    def times(entry: dict[str, float], threads: str) -> str:
        return f"{entry['p50']:.1f} ({entry['p20']:.1f}–{entry['p80']:.1f}) {threads}"

    return markdown_table(
        ("case", "policy", "figure", "stock p50 (p20–p80) threads", "ours", "stock ÷ ours", "bar", "result"),
        [
            (
                row["case"],
                row["policy"],
                row["figure"].replace("_", ", "),
                times(row["stock"], row["stock_threads"]),
                times(row["ours"], row["our_threads"]),
                f"{row['stock_over_ours']:.2f}",
                "" if row["bar"] is None else f"{row['bar']:.2f}",
                {None: "", True: "pass", False: "MISSED"}[row["passed"]],
            )
            for row in rows
        ],
    )


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="comma-separated; all but the slowest where left out")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated")
    parser.add_argument("--threads", default="", help="`all`, `default` or core lists, `;` between; else by case")
    parser.add_argument("--settings", default="{}", type=json.loads, help="more settings of our backend, as JSON")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of both sides (%(default)s)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8"), help="of our side (%(default)s)"
    )
    parser.add_argument("--tokens", default=64, type=int, help="output tokens of a stream that are timed")
    parser.add_argument("--rounds", default=0, type=int, help="instead of each case's own number")
    parser.add_argument("--full", action="store_true", help="also the case that computes 32K tokens, minutes a side")
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, keep the result, after each pair of servers; return 1 if a bar is missed."""
    options = parse_arguments()
    stop_servers_when_terminated()
    cases = select_cases(options.cases, options.full)
    if options.rounds:
        cases = [replace(case, rounds=options.rounds) for case in cases]
    model = options.model or model_dir()
    policies = options.policies.split(",")
    samples: dict[Key, Samples] = {}
    rows: list[Row] = []
    path: Path | None = None
    for policy in policies:
        for threads, together in groups(cases, options.threads):
            say(f"{policy}, threads {threads}: {', '.join(case.name for case in together)}")
            settings = POLICIES[policy] | options.settings
            measured = measure_pair(
                together, settings, threads, model, options.tokens, options.dtype, options.kv_cache_dtype
            )
            samples |= {(name, policy, threads, side): measured[name][side] for name in measured for side in SIDES}
            rows = summarise(samples, cases, policies)
            names = ("case", "policy", "threads", "side")
            raw = [dict(zip(names, key, strict=True)) | asdict(value) for key, value in samples.items()]
            content = {"model": model.name, "dtype": options.dtype, "settings": options.settings}
            content["kv_cache_dtype"] = options.kv_cache_dtype
            path = save("tpot", content | {"rows": rows, "samples": raw}, path)
    print(show(rows))
    say(f"kept in {path}")
    return 0 if all(row["passed"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
