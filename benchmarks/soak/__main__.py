"""Mixed load on one server for an hour: right answers, aborts, mistakes, random requests, and what they leave behind.

    python -m benchmarks.soak [--minutes 60] [--model PATH] [--settings JSON] [--threads all]

The server has SmolLM2-135M-Instruct in float32 with prefix caching, by default with the backend's default settings.
First every prompt is served alone; all later answers must equal these. Then clients ask these prompts again, break off,
leave, make mistakes and send random requests. Every so often the load stops and the server is looked at: at rest all
its KV pages must be free, and from minute 10 on its threads, files and memory must not grow. Nothing is judged by how
long it took, and time in which the whole process tree is stopped does not count. Exits with 1 if a rule is broken.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kv_shape import read_shape
from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import our_args, stop_servers_when_terminated, thread_env
from benchmarks.soak.awake_clock import AwakeClock
from benchmarks.soak.clients import PATIENCE_S, Clients, Tally
from benchmarks.soak.known import Known, candidates, firm
from benchmarks.soak.readings import IDLE, Reading, read_counters, read_processes
from benchmarks.soak.talk import Talk
from benchmarks.soak.verdict import Rule, rules
from benchmarks.soak.wrong_requests import wrong_requests
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.load.client import new_session
from vllm_hybrid_sparse.memory.heap import IDLE_S

MODEL_TOKENS = 2048
SERVED_NAME = "soaked"
AT_ONCE = 6  # requests that the server takes at a time
START_TIMEOUT_S = 3600.0  # long, since the process tree may be stopped in between
_ANSWER_TOKENS = 96  # those before the first close decision are kept
_REST_S = 120.0  # awake seconds that the server has to clean up after requests that were broken off
_POLL_S = 0.5
_TIDY_S = 2 * IDLE_S + 5.0  # until its worker has given free memory back


def say(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)


def make_server(model: Path, settings: Mapping[str, Any], threads: str, log_path: Path) -> Server:
    """Return the server, not started; it has room for all requests that it takes at a time, so none is preempted.

    A resumed request computes the keys of its own answer again, exactly. Under a policy that is not exact, the answer
    may then go on differently.
    """
    kv_bytes = (AT_ONCE + 1) * MODEL_TOKENS * read_shape(model).token_bytes(4) * 1.1  # summaries are a tenth at most
    args = [
        "--dtype=float32",
        f"--max-model-len={MODEL_TOKENS}",
        f"--max-num-seqs={AT_ONCE}",
        f"--kv-cache-memory-bytes={int(kv_bytes)}",
        "--enable-prefix-caching",
        f"--served-model-name={SERVED_NAME}",
        *our_args(dict(settings)),
    ]
    # vLLM ends a worker that takes this long for a step, stopped or not.
    return Server(model, args, thread_env(threads) | {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400"}, log_path)


@dataclass(slots=True)
class Seen:
    """What a soak has seen so far; saved after each look, so that a soak that is cut off is not lost."""

    known: list[Known] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    path: Path | None = None

    def judged(self, options: argparse.Namespace) -> list[Rule]:
        """Return the rules; needs two looks."""
        shape = read_shape(options.model)
        asked_s, after_s = options.minutes * 60, options.settled * 60
        return list(
            rules(self.readings, self.tally.counts, asked_s, after_s, shape.layers * shape.kv_heads, self.tally.tokens)
        )

    def keep(self, options: argparse.Namespace) -> None:
        """Write the result over that of the previous look."""
        content: dict[str, object] = {
            "model": options.model.name,
            "settings": options.settings,
            "known_prompts": len(self.known),
            "known_tokens": sum(len(one.answer) for one in self.known),
            "counts": dict(self.tally.counts),
            "mishaps": self.tally.mishaps,
            "rules": [asdict(rule) for rule in self.judged(options)],
            "readings": [asdict(reading) for reading in self.readings],
        }
        self.path = save("soak", content, self.path)


async def serve_alone(talk: Talk, prompts: Sequence[tuple[int, ...]], clock: AwakeClock) -> list[Known]:
    """Return the prompts with clear answers, each asked while nothing else runs and no part of it is cached."""
    known = []
    for number, prompt in enumerate(prompts):
        body = talk.greedy(prompt, _ANSWER_TOKENS, logprobs=2, cache_salt=f"alone {number}")
        reply = await clock.within(PATIENCE_S, talk.whole(body))
        if reply.status != 200:
            raise RuntimeError(f"prompt of {len(prompt)} tokens: HTTP {reply.status} {reply.text}")
        if answer := firm(reply.token_ids, reply.margins):
            known.append(Known(prompt, answer))
    tokens = sum(len(one.answer) for one in known)
    say(f"served alone: {len(prompts)} prompts, {len(known)} with clear answers of {tokens} tokens")
    return known


async def at_rest(talk: Talk, clock: AwakeClock, begun_s: float) -> Reading:
    """Look at a server without load, once it has cleaned up what was broken off, or after `_REST_S`.

    RuntimeError if it does not show its metrics within that time.
    """
    end_s = clock.awake_s + _REST_S
    while True:
        try:
            counters = read_counters(await clock.within(_REST_S, talk.exposition()))
        except TimeoutError as error:
            raise RuntimeError(f"GET /metrics: {error}") from error
        if not any(counters.get(name) for name in IDLE) or clock.awake_s > end_s:
            await asyncio.sleep(_TIDY_S)
            return Reading(clock.awake_s - begun_s, read_processes(), counters)
        await asyncio.sleep(_POLL_S)


async def soak(server: Server, options: argparse.Namespace, seen: Seen) -> None:
    """Serve every prompt alone, then put the load on; `seen` is saved after each look at the server."""
    root, clock = server.base_url.removesuffix("/v1"), AwakeClock()
    async with new_session() as http:
        ticking = asyncio.create_task(clock.run())
        talk = Talk(http, root, SERVED_NAME)
        seen.known = await serve_alone(talk, candidates(options.model, options.seed), clock)
        wrong = wrong_requests(SERVED_NAME, MODEL_TOKENS)
        clients = Clients(talk, root, seen.known, wrong, clock, seen.tally)
        rngs = [random.Random(options.seed * 1000 + number) for number in range(options.clients)]
        begun_s = clock.awake_s
        seen.readings.append(await at_rest(talk, clock, begun_s))
        end_s = begun_s + options.minutes * 60
        while clock.awake_s < end_s and server.running():
            until_s = min(end_s, clock.awake_s + options.every * 60)
            await asyncio.gather(*(clients.act_until(until_s, rng, options.pause) for rng in rngs))
            seen.readings.append(await at_rest(talk, clock, begun_s))
            seen.keep(options)
            say(
                f"{seen.readings[-1].awake_s / 60:5.1f} min: {dict(seen.tally.counts)}, {_processes(seen.readings[-1])}"
            )
        ticking.cancel()


def _processes(reading: Reading) -> str:
    return ", ".join(
        f"{name} {process.resident_bytes / 2**20:.1f} MiB, {process.threads} threads, {process.cpu_s:.0f} s"
        for name, process in reading.processes.items()
    )


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load (%(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="minutes between two looks at rest (%(default)s)")
    parser.add_argument("--settled", type=float, default=10.0, help="minute from which growth counts (%(default)s)")
    parser.add_argument("--clients", type=int, default=AT_ONCE, help="at the same time (%(default)s)")
    parser.add_argument(
        "--pause", type=float, default=4.0, help="mean seconds between two actions of a client (%(default)s)"
    )
    parser.add_argument("--threads", default="all", help="cores of the worker: all, default, or a list (%(default)s)")
    parser.add_argument("--model", type=Path, default=None, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--settings",
        type=json.loads,
        default={},
        help="of the backend, as JSON; such that answers do not depend on load",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--log", type=Path, default=None, help="keep the server's log here")
    options = parser.parse_args()
    options.model = options.model or model_dir()
    return options


def main() -> int:
    """Run the soak, print the rules, keep the result; return 1 if one is broken."""
    options = parse_arguments()
    stop_servers_when_terminated()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        server = make_server(
            options.model, options.settings, options.threads, options.log or Path(folder) / "server.log"
        )
        with server:
            say(f"server ready after {server.wait_ready(START_TIMEOUT_S):.0f} s")
            seen = Seen()
            asyncio.run(soak(server, options, seen))
    table = [(rule.name, rule.seen, "yes" if rule.held else "NO") for rule in seen.judged(options)]
    print(markdown_table(("rule", "seen", "held"), table))
    say(f"kept in {seen.path}")
    return int(not all(rule.held for rule in seen.judged(options)))


if __name__ == "__main__":
    sys.exit(main())
