"""PSA's capacity on this machine: the highest rate within the strict and the relaxed limits, by policy.

    python -m benchmarks.serving.capacity --out DIR [--texts leval-legal_contract_qa.jsonl] [--servers stock,topk-5]

One server at a time serves SmolLM2-135M-Instruct; they differ only in the backend and are bound to all cores. Several
questions are asked about each of a few documents that the server has read before, so decoding is the bottleneck. The
limits are multiples of stock vLLM's decode iteration, so `stock` comes first. Then each policy's server gets prompts
that it has not seen, with short answers, in turns with stock vLLM: there prefill is the bottleneck (`--no-prefill`
leaves this out). A report that DIR has is not measured again. One that was measured with other options, or under the
limits of another stock vLLM, is refused; only the search for the rate may differ. The last lines compare all reports.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.machine import provenance
from benchmarks.report import markdown_table
from benchmarks.serving.backends import (
    DTYPES,
    START_TIMEOUT_S,
    our_args,
    serve_args,
    stop_servers_when_terminated,
    thread_env,
)
from benchmarks.serving.capacity_reports import Json, OtherOptionsError, bench, read_report
from benchmarks.serving.capacity_traces import prefill_trace, question_trace, read_texts
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.load.mixes import Lengths
from vllm_hybrid_sparse.load.report import trace_digest
from vllm_hybrid_sparse.load.traces import write_trace

REFERENCE = "stock"
# Settings of our backend by the name of the server; the reference has none.
SERVERS: dict[str, dict[str, object] | None] = {
    REFERENCE: None,
    "progressive": {"policy": "progressive", "threshold": 0.95},
    "fluxion-16": {"policy": "fluxion", "granularity": 16},
    **{
        f"topk-{percent}": {"policy": "topk", "topk_ratio": percent / 100}
        for percent in (5, 10, 20, 30, 40, 60, 70, 80)
    },
    "dense": {"policy": "dense"},
}
# Where the search begins, requests a second on two cores: guesses, which cost time if they are wrong.
FIRST_RATES = {REFERENCE: 0.12, "dense": 0.15, "topk-5": 0.34}
OTHER_FIRST_RATE = 0.27
MODEL_TOKENS = 8192
_BESIDE_TOKENS = 2048  # room for each request besides its document; earlier questions stay cached, too
_PREFILL = "-prefill"  # ends the name of a report on the second trace
_PREFILL_CLIENTS = 2
_PREFILL_OUTPUT_TOKENS = 8
_PREFILL_ROUNDS = 3


def say(line: str) -> None:
    """Show progress with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def make_server(name: str, options: argparse.Namespace) -> Server:
    """Return the server called `name`, not started."""
    settings, model = SERVERS[name], options.model
    cached_tokens = options.documents * options.document_tokens + options.at_once * _BESIDE_TOKENS
    args = [
        *serve_args(model, MODEL_TOKENS, cached_tokens, filled=False, dtype=options.dtype),
        f"--max-num-seqs={options.at_once}",
        "--enable-prefix-caching",
        f"--served-model-name={model.name}",
        *([] if settings is None else our_args(settings)),
    ]
    return Server(model, args, thread_env(options.threads), options.out / f"{name}.log")


def measured_with(name: str, options: argparse.Namespace) -> Json:
    """Return what a report depends on, except code and machine; `name` is a server's, or ends in `-prefill`.

    How the rate is searched for is left out: it decides how precisely the rate is known, not what it is.
    """
    server = {
        "model": options.model.name,
        **{part: getattr(options, part) for part in ("dtype", "at_once", "documents", "document_tokens", "threads")},
        "arrivals": "rescaled",  # an older report's came at another rate than the one that was tried
    }
    if name.endswith(_PREFILL):
        return server | {"trace_sha256": options.digests["prefill"]}
    limit_ms = None if name == REFERENCE else iteration_ms(options)
    return server | {
        "trace_sha256": options.digests["questions"],
        "try_seconds": options.try_seconds,
        "iteration_ms": None if limit_ms is None else round(limit_ms, 3),
    }


def kept_report(name: str, options: argparse.Namespace) -> Json | None:
    """Return an earlier report with the same options; None if there is none, OtherOptionsError if options differ."""
    path = options.out / f"{name}.json"
    return read_report(path, measured_with(name, options)) if path.is_file() else None


def kept_reports(options: argparse.Namespace, end: str = "") -> dict[str, Json]:
    """Return all earlier reports by server; `end` is the end of their names."""
    return {name: found for name in SERVERS if (found := kept_report(name + end, options))}


def iteration_ms(options: argparse.Namespace) -> float | None:
    """Return stock vLLM's unloaded decode iteration; None if it has not been measured."""
    found = kept_report(REFERENCE, options)
    return None if found is None else found["servers"][0]["unloaded"]["iteration_s"] * 1e3


def measure(name: str, options: argparse.Namespace) -> None:
    """Search for one server's capacity, unless its report exists."""
    if kept_report(name, options):
        say(f"{name}: there already")
        return
    known_ms = iteration_ms(options)
    if known_ms is None and name != REFERENCE:
        raise RuntimeError(f"{name}: needs the limits of {REFERENCE}; measure that first")
    limits = [] if known_ms is None or name == REFERENCE else ["--iteration-ms", f"{known_ms:.3f}"]
    with make_server(name, options) as server:
        say(f"{name}: ready after {server.wait_ready(START_TIMEOUT_S):.0f} s")
        bench(
            f"{name}={server.base_url}", options.out / name, measured_with(name, options),
            "--trace", str(options.out / "questions.jsonl"), "--salt", "never", "--warm-up", "3",
            "--capacity", "psa", "--first-rate", f"{FIRST_RATES.get(name, OTHER_FIRST_RATE) * options.rate_factor:.4g}",
            "--step", str(options.step), "--tolerance", str(options.tolerance), "--tries", str(options.tries),
            "--try-seconds", str(options.try_seconds), *limits,
        )  # fmt: skip
    say(f"{name}: done")


def measure_prefill(name: str, options: argparse.Namespace) -> None:
    """Send the second trace to a policy's server and to the reference's in turns, unless the report exists."""
    of_it = name + _PREFILL
    if name == REFERENCE or kept_report(of_it, options):
        return
    with make_server(REFERENCE, options) as theirs, make_server(name, options) as ours:
        for server in (theirs, ours):
            server.wait_ready(START_TIMEOUT_S)
        bench(
            f"{REFERENCE}={theirs.base_url}", options.out / of_it, measured_with(of_it, options),
            "--vs", f"{name}={ours.base_url}",
            "--trace", str(options.out / "prefill.jsonl"), "--salt", "each-run", "--warm-up", "1",
            "--clients", str(_PREFILL_CLIENTS), "--rounds", str(_PREFILL_ROUNDS),
        )  # fmt: skip
    say(f"{name}: prefill done")


def compare(reports: Mapping[str, Json], prefills: Mapping[str, Json]) -> list[Json]:
    """Return one row per server, with its ratio to the reference; a prefill report holds its own reference."""
    rows: list[Json] = []
    for name, found in reports.items():
        row: Json = {"server": name}
        for limit, seen in found["capacity"]["servers"][0]["capacity"].items():
            row[limit] = {part: seen[part] for part in ("holds_per_s", "fails_per_s", "too_short")}
            base = reports[REFERENCE]["capacity"]["servers"][0]["capacity"][limit]["holds_per_s"]
            holds = seen["holds_per_s"]
            row[limit]["of_reference"] = holds / base if holds and base else None
        if len(prefills.get(name, {}).get("servers", ())) == 2:
            theirs, mine = (side["figures"] for side in prefills[name]["servers"])
            row["prefill"] = {
                "requests_per_s": mine["requests_per_s"],
                "reference_requests_per_s": theirs["requests_per_s"],
                "of_reference": mine["requests_per_s"] / theirs["requests_per_s"],
                "ttft_p50_s": mine["ttft_s"]["p50"],
                "reference_ttft_p50_s": theirs["ttft_s"]["p50"],
            }
        rows.append(row)
    return rows


def compare_kept(options: argparse.Namespace) -> list[Json]:
    """Return the rows of all existing reports; OtherOptionsError if one was measured with other options."""
    return compare(kept_reports(options), {} if options.no_prefill else kept_reports(options, _PREFILL))


def show(rows: Sequence[Json]) -> str:
    """Return the rows as a table."""

    def cell(seen: Json | None) -> list[str]:
        if seen is None:
            return ["", ""]
        holds, fails, ratio = seen["holds_per_s"], seen["fails_per_s"], seen["of_reference"]
        short = ", too short" if seen["too_short"] else ""
        return [f"{holds or 0:.3f} to {fails or float('inf'):.3f}{short}", "" if ratio is None else f"{ratio:.2f}"]

    header = [
        "server",
        "strict: holds, fails",
        "of stock",
        "relaxed: holds, fails",
        "of stock",
        "prefill, requests/s (stock beside it)",
        "of stock",
    ]
    lines = []
    for row in rows:
        prefill = row.get("prefill")
        last = ["", ""]
        if prefill is not None:
            rates = f"{prefill['requests_per_s']:.3f} ({prefill['reference_requests_per_s']:.3f})"
            last = [rates, f"{prefill['of_reference']:.2f}"]
        lines.append([row["server"], *cell(row.get("strict")), *cell(row.get("relaxed")), *last])
    return markdown_table(header, lines)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="reports; those that are there stay")
    parser.add_argument("--servers", default="stock,progressive,topk-5,topk-30", help=f"among {', '.join(SERVERS)}")
    parser.add_argument(
        "--texts",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="L-Eval's JSONL, the longest of each (default: prose)",
    )
    parser.add_argument("--documents", type=int, default=5, help="to ask about (%(default)s)")
    parser.add_argument("--document-tokens", type=int, default=57 * 128, help="of each (%(default)s)")
    parser.add_argument("--questions", type=int, default=32, help="over each document (%(default)s)")
    parser.add_argument("--output", default="128:16,256:2,512:1", help="answers in tokens with weights (%(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="requests that a server takes at a time (%(default)s)")
    parser.add_argument("--try-seconds", type=float, default=130.0, help="of each tried rate (%(default)s)")
    parser.add_argument("--tries", type=int, default=2, help="most for a limit (%(default)s)")
    parser.add_argument("--step", type=float, default=1.4, help="between rates until one fails (%(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.25, help="of a capacity, relative (%(default)s)")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="on all first rates (%(default)s)")
    parser.add_argument("--prefill-words", type=int, default=1500, help="of a prompt of the second trace (%(default)s)")
    parser.add_argument("--prefill-requests", type=int, default=10, help="of the second trace (%(default)s)")
    parser.add_argument("--no-prefill", action="store_true", help="the first trace alone")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of all servers (%(default)s)")
    parser.add_argument("--threads", default="all", help="cores of the worker: all, default, or a list (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--model", type=Path, default=None, help="instead of SmolLM2-135M-Instruct")
    options = parser.parse_args()
    if unknown := set(options.servers.split(",")) - set(SERVERS):
        parser.error(f"servers={','.join(sorted(unknown))}: must be among {', '.join(SERVERS)}")
    return options


def main() -> int:
    """Measure what is missing, compare all reports, keep the comparison; return 0."""
    options = parse_arguments()
    stop_servers_when_terminated()
    options.out.mkdir(parents=True, exist_ok=True)
    options.model = options.model or model_dir()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = read_texts(options.texts, options.documents, options.seed)
    output = Lengths.parse("output", options.output)
    traces = {
        "questions": question_trace(texts, tokenizer, options.document_tokens, options.questions, output, options.seed)
    }
    if not options.no_prefill:
        traces["prefill"] = prefill_trace(
            texts, options.prefill_words, options.prefill_requests, _PREFILL_OUTPUT_TOKENS
        )
    options.digests = {name: trace_digest(requests) for name, requests in traces.items()}
    try:
        compare_kept(options)  # refused before hours of measuring
        for name, requests in traces.items():
            write_trace(options.out / f"{name}.jsonl", requests)
        for name in options.servers.split(","):
            measure(name, options)
            if not options.no_prefill:
                measure_prefill(name, options)
            rows = compare_kept(options)
            print(show(rows), flush=True)
            content = provenance() | {"dtype": options.dtype, "iteration_ms": iteration_ms(options), "rows": rows}
            (options.out / "capacity.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OtherOptionsError as error:
        raise SystemExit(f"capacity: {error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
