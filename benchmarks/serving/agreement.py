"""`hybrid-sparse bench` against `vllm bench serve`: the same requests at the same times on the same server, in turns.

    python -m benchmarks.serving.agreement [--requests 32] [--rate 0.5] [--rounds 2]

Stock vLLM serves SmolLM2-135M-Instruct without prefix caching. `vllm bench serve` sends the first round's requests at
Poisson times of its own, and `hybrid-sparse bench` then keeps to these times. They take turns at going first. Two
comparisons:

- the definitions: if we sum up the times that `vllm bench serve` noted, we must get its own figures;
- the clients: what each saw in its own runs, which also differ by what the machine did meanwhile.

Exits with 1 if a definition differs, or a median by more than 5 %. `vllm bench serve` needs pandas to read requests.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import START_TIMEOUT_S, serve_args, stop_servers_when_terminated, thread_env
from vllm_hybrid_sparse.cli.bench import write_prose
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.load.answer import Arrival, Counted
from vllm_hybrid_sparse.load.exchange import Attempt, Outcome, Record
from vllm_hybrid_sparse.load.figures import Figures, figures
from vllm_hybrid_sparse.load.mixes import Lengths, prose_mix
from vllm_hybrid_sparse.load.queueing import Unloaded
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Run
from vllm_hybrid_sparse.load.traces import write_trace

MODEL_TOKENS = 2048
SERVED_NAME = "smollm2"
ALLOWED = 0.05  # of a median, between the two clients
SAME = 1e-6  # of a figure, between two sums over the same times
_SAMPLE_WORDS = 2000

Json = dict[str, Any]

# (name in `vllm bench serve`, name in ours); both have mean, median and P99.
TIMES = (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "tbt_s"), ("e2el", "e2e_s"))
PARTS = (("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p99", "p99"))
RATES = (("request_throughput", "requests_per_s"), ("output_throughput", "output_tokens_per_s"))


def make_requests(model: Path, count: int, prompts: str, output: str, seed: int) -> list[Request]:
    """Return requests of prose of about the given lengths in tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sample = write_prose(_SAMPLE_WORDS, seed)
    words_per_token = len(sample.split()) / len(tokenizer.encode(sample).ids)
    lengths = Lengths.parse("prompts", prompts), Lengths.parse("output", output)
    return prose_mix(write_prose, *lengths, count, words_per_token, seed)


def recorded_run(noted: Json) -> Run:
    """Return the run that `vllm bench serve --save-detailed` noted, as if our own client had seen it."""
    first_s = min(noted["start_times"])
    records = []
    for index, start_s in enumerate(noted["start_times"]):
        arrivals = [Arrival(noted["ttfts"][index], 1)]
        for gap_s in noted["itls"][index]:
            arrivals.append(Arrival(arrivals[-1].at_s + gap_s, 1))
        tokens = noted["output_lens"][index]
        record = Record(
            index=index, group=None, due_s=None, sent_s=start_s - first_s, ended_s=arrivals[-1].at_s, sendings=1,
            arrivals=tuple(arrivals), outcome=Outcome.OK, reason="", attempts=(Attempt(0.0, Outcome.OK, ""),),
            prompt_tokens=noted["input_lens"][index], cached_tokens=None, output_tokens=tokens, counted=Counted.TOTAL,
            max_tokens=tokens, ignore_eos=True, finish_reason="length", text="",
        )  # fmt: skip
        records.append(record)
    return Run(tuple(records), len(records), noted["duration"], interrupted=False)


def of_ours(seen: Json, scale: float = 1e3) -> dict[str, float]:
    """Return our figures under the names of `vllm bench serve`; times in milliseconds."""
    named = {f"{part}_{theirs}_ms": seen[ours][our_part] * scale for theirs, ours in TIMES for part, our_part in PARTS}
    return named | {theirs: seen[ours] for theirs, ours in RATES}


def definitions_differ(noted: Json) -> dict[str, tuple[float, float]]:
    """Return the figures that `vllm bench serve` and we compute differently from the same times: (theirs, ours)."""
    seen: Figures = figures([recorded_run(noted)], None, Unloaded((), None))
    return {
        name: (noted[name], value)
        for name, value in of_ours(asdict(seen)).items()
        if abs(value - noted[name]) > SAME * noted[name]
    }


class Clients:
    """The two programs, on one server."""

    def __init__(self, server: Server, requests: Sequence[Request], folder: Path, rate: float, seed: int) -> None:
        self._server = server
        self._requests = requests
        self._folder = folder
        self._rate = rate
        self._seed = seed
        lines = [{"prompt": request.prompt, "output_tokens": request.max_tokens} for request in requests]
        (folder / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    def theirs(self) -> Json:
        """Run `vllm bench serve` and return its result, details included."""
        options = {
            "backend": "openai", "base-url": self._server.base_url.removesuffix("/v1"), "endpoint": "/v1/completions",
            "model": SERVED_NAME, "tokenizer": self._server.model, "dataset-name": "custom",
            "dataset-path": self._folder / "requests.jsonl", "num-prompts": len(self._requests),
            "custom-output-len": -1, "request-rate": self._rate, "seed": self._seed, "temperature": 0,
            "percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": "90,99",
            "result-dir": self._folder, "result-filename": "theirs.json",
        }  # fmt: skip
        flags = ("skip-chat-template", "disable-shuffle", "ignore-eos", "save-result", "save-detailed", "disable-tqdm")
        vllm = str(Path(sys.executable).parent / "vllm")
        arguments = [f"--{name}={value}" for name, value in options.items()]
        _run([vllm, "bench", "serve", *arguments, *(f"--{flag}" for flag in flags)])
        noted: Json = json.loads((self._folder / "theirs.json").read_text(encoding="utf-8"))
        if noted["completed"] != len(self._requests):
            raise RuntimeError(f"vllm bench serve: {noted['completed']} of {len(self._requests)} requests answered")
        return noted

    def ours(self, arrivals_s: Sequence[float]) -> Json:
        """Run `hybrid-sparse bench` at the given times and return its report."""
        trace, out = self._folder / "trace.jsonl", self._folder / "ours"
        pairs = zip(self._requests, arrivals_s, strict=True)
        write_trace(trace, [replace(request, arrival_s=arrival_s) for request, arrival_s in pairs])
        bench = [sys.executable, "-m", "vllm_hybrid_sparse.cli.main", "bench", "--url", self._server.base_url]
        _run(
            [*bench, "--trace", str(trace), "--recorded-times", "--salt", "never", "--warm-up", "1", "--out", str(out)]
        )
        return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} {command[1]}: status {done.returncode}\n{done.stderr[-2000:]}")


def compare(theirs: Sequence[Json], ours: Sequence[Json]) -> list[Json]:
    """Return one row per figure: the median round of each client, and ours over theirs."""
    rows = []
    for name in of_ours(ours[0]):
        values = [sorted(one[name] for one in runs) for runs in (theirs, [of_ours(one) for one in ours])]
        low, high = map(statistics.median, values)
        rows.append(
            {"figure": name, "vllm bench serve": values[0], "hybrid-sparse bench": values[1], "ratio": high / low}
        )
    return rows


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="of a round (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each client (%(default)s)")
    parser.add_argument("--prompts", default="128:2,512:1", help="lengths in tokens with weights (%(default)s)")
    parser.add_argument("--output", default="32:1,64:1", help="lengths in tokens with weights (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--threads", default="all", help="cores of the worker: all, default, or a list (%(default)s)")
    parser.add_argument("--model", type=Path, default=None, help="instead of SmolLM2-135M-Instruct")
    return parser.parse_args()


def measure(options: argparse.Namespace, model: Path) -> tuple[list[Json], list[Json]]:
    """Serve, let both clients run in turns, and return what each reported."""
    args = [*serve_args(model, MODEL_TOKENS, 16 * MODEL_TOKENS, filled=False), "--no-enable-prefix-caching"]
    requests = make_requests(model, options.requests, options.prompts, options.output, options.seed)
    theirs: list[Json] = []
    ours: list[Json] = []
    with tempfile.TemporaryDirectory(prefix="agreement-") as place:
        folder = Path(place)
        named = [*args, f"--served-model-name={SERVED_NAME}"]
        with Server(model, named, thread_env(options.threads), folder / "server.log") as server:
            print(f"server ready after {server.wait_ready(START_TIMEOUT_S):.0f} s", file=sys.stderr, flush=True)
            clients = Clients(server, requests, folder, options.rate, options.seed)
            arrivals_s: list[float] = []
            for round_ in range(options.rounds):
                if round_ % 2 == 0:
                    theirs.append(clients.theirs())
                    begun = theirs[0]["start_times"]
                    arrivals_s = arrivals_s or [start_s - begun[0] for start_s in begun]
                    ours.append(clients.ours(arrivals_s))
                else:
                    ours.append(clients.ours(arrivals_s))
                    theirs.append(clients.theirs())
                print(f"round {round_ + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return theirs, ours


def main() -> int:
    """Measure, print the comparison, keep the result; return 1 if the two do not agree."""
    options = parse_arguments()
    stop_servers_when_terminated()
    model = options.model or model_dir()
    theirs, reports = measure(options, model)
    ours = [report["servers"][0]["figures"] for report in reports]
    differ = [definitions_differ(noted) for noted in theirs]
    rows = compare(theirs, ours)
    cells = [
        [
            row["figure"],
            *(" ".join(f"{value:.2f}" for value in row[who]) for who in list(row)[1:3]),
            f"{row['ratio']:.3f}",
        ]
        for row in rows
    ]
    print(markdown_table(("figure", "vllm bench serve", "hybrid-sparse bench", "ours ÷ theirs"), cells))
    print(f"figures that we make otherwise of the times that it noted: {differ if any(differ) else 'none'}")
    told = [{name: value for name, value in noted.items() if not isinstance(value, list)} for noted in theirs]
    for one in told:
        one.pop("tokenizer_id", None)
    path = save(
        "agreement",
        {
            "requests": options.requests,
            "rate": options.rate,
            "prompts": options.prompts,
            "output": options.output,
            "rows": rows,
            "definitions_differ": differ,
            "vllm bench serve": told,
            "hybrid-sparse bench": ours,
        },
    )
    print(f"kept in {path}", file=sys.stderr)
    medians = [row["ratio"] for row in rows if row["figure"].startswith("median")]
    return int(any(differ) or any(abs(ratio - 1) > ALLOWED for ratio in medians))


if __name__ == "__main__":
    sys.exit(main())
