"""The options of `hybrid-sparse bench`, checked."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm_hybrid_sparse.cli.json_object import json_object
from vllm_hybrid_sparse.cli.output_file import writable
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.capacity import Search, psa_slos
from vllm_hybrid_sparse.load.figures import Limits
from vllm_hybrid_sparse.load.mixes import Lengths
from vllm_hybrid_sparse.load.ruler import TASKS
from vllm_hybrid_sparse.load.target import Address, Api, Target
from vllm_hybrid_sparse.load.task_mix import TaskWeights

DESCRIPTION = """Put load on an OpenAI-compatible server and report what its clients see.

  hybrid-sparse bench --url http://127.0.0.1:8000 --prose 1024:3,4096:1 --rate 0.5
  hybrid-sparse bench --url http://127.0.0.1:8000 --documents *.txt --clients 4
  hybrid-sparse bench --url http://127.0.0.1:8000 --tasks all --task-tokens 4096:3,16384:1 --clients 4
  hybrid-sparse bench --url stock=http://127.0.0.1:8000 --vs ours=http://127.0.0.1:8001 --documents *.txt --capacity psa

An API key in OPENAI_API_KEY goes to every server that is named. Ctrl-C ends the run and writes what was
measured until then."""

_USED_WITH = {  # options, and those that have no effect without any of them
    ("capacity",): ("first_rate", "step", "try_seconds", "tolerance", "tries", "iteration_ms"),
    ("recorded_times",): ("speed",),
    ("documents",): ("document_tokens", "questions", "questions_per_document"),
    ("tasks",): ("task_tokens",),
    ("documents", "prose", "tasks"): ("output_tokens", "stop_at_eos"),
}

_OUTPUT_TOKENS = "128"  # of documents and prose

_MANY = "repeatable; requests of all sources are interleaved"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What was asked for; `arguments` are the options as given, for the report."""

    targets: tuple[Target, ...]  # the first is the reference; model and key are not known yet
    model: str | None
    traces: tuple[Path, ...]
    documents: tuple[Path, ...]
    document_tokens: int | None
    questions: Path | None
    questions_per_document: int
    prose: Lengths | None
    tasks: TaskWeights | None
    task_lengths: Lengths
    output: Lengths  # of documents and prose
    task_output: Lengths | None  # None: each task's own
    stop_at_eos: bool
    requests: int | None
    rate: float | None
    clients: int | None
    recorded_times: bool
    speed: float
    capacity: bool
    search: Search
    iteration_ms: float | None
    rounds: int
    seed: int
    salt: str
    warm_up: int
    goodput: Limits | None
    out: Path
    save_trace: Path | None
    keep_text: bool
    arguments: dict[str, Any]

    @classmethod
    def of(cls, given: argparse.Namespace) -> Self:
        """Check what was given; ConfigError names option, value and rule."""
        ways = sum(
            (given.rate is not None, given.clients is not None, given.recorded_times, given.capacity is not None)
        )
        if ways != 1:
            raise ConfigError("rate, clients, recorded-times, capacity: exactly one of them must be given")
        if not (given.trace or given.documents or given.prose or given.tasks):
            raise ConfigError("trace, documents, prose, tasks: at least one of them must be given")
        for name in ("rate", "first_rate", "speed"):
            value = getattr(given, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name.replace('_', '-')}={value}: must be above 0, finite")
        for name in ("requests", "clients", "document_tokens", "questions_per_document", "rounds", "warm_up"):
            value = getattr(given, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')}={value}: must be at least 1")
        if given.capacity is not None and given.rounds != 1:
            raise ConfigError(f"rounds={given.rounds}: must be 1 with capacity, which makes runs of its own")
        if given.iteration_ms is not None:
            psa_slos(given.iteration_ms / 1e3)  # refuses what is not a time
        _check_use(given)
        _check_outputs(given)
        addresses = (Address.parse("url", given.url), *(Address.parse("vs", text) for text in given.vs))
        names = [address.name for address in addresses]
        if len(set(names)) < len(names):
            raise ConfigError(f"vs={', '.join(names[1:])}: servers must differ in name; give them as NAME=URL")
        output = None if given.output_tokens is None else Lengths.parse("output-tokens", given.output_tokens)
        return cls(
            targets=tuple(
                Target(
                    address=address,
                    model="",
                    api=Api(given.api),
                    timeout_s=given.timeout,
                    retries=given.retries,
                    extra_body=json_object("extra-body", given.extra_body),
                )
                for address in addresses
            ),
            model=given.model,
            traces=tuple(given.trace),
            documents=tuple(given.documents),
            document_tokens=given.document_tokens,
            questions=given.questions,
            questions_per_document=given.questions_per_document,
            prose=None if given.prose is None else Lengths.parse("prose", given.prose),
            tasks=None if given.tasks is None else TaskWeights.parse("tasks", given.tasks),
            task_lengths=Lengths.parse("task-tokens", given.task_tokens),
            output=output or Lengths.parse("output-tokens", _OUTPUT_TOKENS),
            task_output=output,
            stop_at_eos=given.stop_at_eos,
            requests=given.requests,
            rate=given.rate,
            clients=given.clients,
            recorded_times=given.recorded_times,
            speed=given.speed,
            capacity=given.capacity is not None,
            search=Search(
                first=given.first_rate,
                step=given.step,
                try_s=given.try_seconds,
                tolerance=given.tolerance,
                tries=given.tries,
            ),
            iteration_ms=given.iteration_ms,
            rounds=given.rounds,
            seed=given.seed,
            salt=given.salt,
            warm_up=given.warm_up,
            goodput=None if given.goodput is None else Limits.parse("goodput", given.goodput),
            out=given.out,
            save_trace=given.save_trace,
            keep_text=given.keep_text,
            arguments={name: value for name, value in vars(given).items() if name != "command"},
        )


def _check_use(given: argparse.Namespace) -> None:
    """Refuse options that would have no effect, if they differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    for options, names in _USED_WITH.items():
        if any(getattr(given, option) for option in options):
            continue
        for name in names:
            value = getattr(given, name)
            if value != parser.get_default(name):
                *some, last = (f"--{option.replace('_', '-')}" for option in options)
                needed = f"{', '.join(some)} or {last}" if some else last
                verb = "is" if len(options) == 1 else "are"
                raise ConfigError(f"{name.replace('_', '-')}={value}: used with {needed} only, which {verb} not given")


def report_files(out: Path) -> tuple[Path, Path]:
    """Return the JSON and the HTML file of a report; `out` may name either of them."""
    stem = out.name.removesuffix(".json").removesuffix(".html")
    return out.with_name(f"{stem}.json"), out.with_name(f"{stem}.html")


def _check_outputs(given: argparse.Namespace) -> None:
    """Refuse output files that cannot be written, or that are also read or written as something else."""
    writable("out", given.out)
    taken = {path.resolve(): "read" for path in (*given.trace, *given.documents, given.questions) if path is not None}
    outputs = [("save-trace", given.save_trace), *(("out", path) for path in report_files(given.out))]
    for option, path in outputs:
        if path is None:
            continue
        writable(option, path)
        if use := taken.get(path.resolve()):
            raise ConfigError(f"{option}={path}: must be another file than the one that is {use} there")
        taken[path.resolve()] = "written"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hybrid-sparse bench` to its parser."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("servers")
    server.add_argument("--url", required=True, metavar="[NAME=]URL", help="server; with --vs the reference of ratios")
    server.add_argument(
        "--vs", action="append", default=[], metavar="[NAME=]URL", help="another one, run in turns; repeatable"
    )
    server.add_argument("--model", help="model to ask for (default: the only one that the server has)")
    server.add_argument("--api", choices=[api.value for api in Api], default=Api.COMPLETIONS.value)
    server.add_argument("--extra-body", default="{}", metavar="JSON", help="further fields of every request")
    server.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for a request, retries included (%(default)s)"
    )
    server.add_argument(
        "--retries", type=int, default=0, help="further attempts before a first token came (%(default)s)"
    )

    trace = parser.add_argument_group("requests")
    trace.add_argument(
        "--trace", action="append", default=[], type=Path, metavar="FILE", help=f"recorded JSONL; {_MANY}"
    )
    trace.add_argument(
        "--documents", nargs="+", default=[], type=Path, metavar="FILE", help="several questions over each"
    )
    trace.add_argument("--document-tokens", type=int, help="cut documents to about this many tokens (default: whole)")
    trace.add_argument(
        "--questions", type=Path, metavar="FILE", help="questions, one a line (default: eight general ones)"
    )
    trace.add_argument("--questions-per-document", type=int, default=4, help="(%(default)s)")
    trace.add_argument(
        "--prose", metavar="TOKENS[:WEIGHT],…", help="made-up prose of about these lengths, no two alike"
    )
    trace.add_argument(
        "--tasks", metavar="NAME[:WEIGHT],…", help=f"RULER-like tasks, no two prompts alike: all, {', '.join(TASKS)}"
    )
    trace.add_argument(
        "--task-tokens", default="4096", metavar="TOKENS[:WEIGHT],…", help="of the prompts of tasks (%(default)s)"
    )
    trace.add_argument(
        "--output-tokens",
        metavar="TOKENS[:WEIGHT],…",
        help=f"of documents, prose (default {_OUTPUT_TOKENS}), tasks (default: what a right answer needs)",
    )
    trace.add_argument(
        "--stop-at-eos", action="store_true", help="let answers to documents, prose and tasks end by themselves"
    )
    trace.add_argument(
        "--requests",
        type=int,
        help="of prose and of tasks (default 32 each); of all together, the first so many (default: all)",
    )
    trace.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    trace.add_argument("--save-trace", type=Path, metavar="FILE", help="write the requests as a recorded trace")

    load = parser.add_argument_group("load, exactly one of the first four")
    load.add_argument("--rate", type=float, help="Poisson arrivals, requests a second")
    load.add_argument("--clients", type=int, help="so many clients, each waiting for its answer before it asks again")
    load.add_argument("--recorded-times", action="store_true", help="at the trace's arrival times, less the first")
    load.add_argument(
        "--capacity", choices=["psa"], help="search the highest rate within PSA's strict and relaxed limits"
    )
    load.add_argument("--speed", type=float, default=1.0, help="of --recorded-times, times as fast (%(default)s)")
    load.add_argument(
        "--first-rate", type=float, default=1.0, help="of --capacity, where the search begins (%(default)s)"
    )
    load.add_argument(
        "--step",
        type=float,
        default=2.0,
        help="of --capacity, factor between rates until one holds and one fails (%(default)s)",
    )
    load.add_argument(
        "--try-seconds", type=float, help="of --capacity, how long each try sends requests (default: all of the trace)"
    )
    load.add_argument("--tolerance", type=float, default=0.1, help="of --capacity, relative (%(default)s)")
    load.add_argument("--tries", type=int, default=8, help="of --capacity, most runs a limit and server (%(default)s)")
    load.add_argument("--iteration-ms", type=float, help="of --capacity (default: measured unloaded on the reference)")
    load.add_argument("--rounds", type=int, default=1, help="runs on each server, in turns (%(default)s)")
    load.add_argument("--warm-up", type=int, default=4, help="requests served alone before the first run (%(default)s)")
    load.add_argument(
        "--salt",
        choices=["auto", "each-run", "never"],
        default="auto",
        help="begin the prompts of each run with a line of its own, so that none finds another run's prefixes cached; "
        "auto: but for requests in groups, which are read once and stay cached, and token ids",
    )

    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", metavar="NAME:MS,…", help="limits on ttft, tbt, tpot, e2e that a good request keeps"
    )
    report.add_argument(
        "--out", type=Path, default=Path("bench"), metavar="NAME", help="NAME.json, NAME.html (%(default)s)"
    )
    report.add_argument("--keep-text", action="store_true", help="keep the text of the answers in the JSON")
