"""Measures servers in turns on the same requests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import Schedule
from vllm_hybrid_sparse.load.figures import Figures, Limits, figures
from vllm_hybrid_sparse.load.mixes import salt_for
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.runner import Standing
from vllm_hybrid_sparse.load.side import Measured, Say, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests, and what to do before they are sent."""

    requests: tuple[Request, ...]  # not empty
    salt: str | None  # every prompt of a run begins with a line made from this and the names of server and run, so that
    # no run finds prefixes cached by another one, by one on a server that shares its cache, or by an earlier
    # measurement with another salt; None: prompts stay as they are
    spares_groups: bool = False  # no salt for token ids, nor for requests of a group, which should find their prefix
    prime: bool  # before a run, have the first request of each group read
    warm_up: int = 4  # requests sent alone before the first run, of lengths spread over the trace's, >= 1
    warm_up_tokens: int = 64  # most output tokens of each, >= 2

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("trace: must have at least one request")
        if self.warm_up < 1:
            raise ConfigError(f"warm-up={self.warm_up}: must be at least 1")
        if self.warm_up_tokens < 2:
            raise ConfigError(f"warm-up-tokens={self.warm_up_tokens}: must be at least 2")

    def of_run(self, name: str, side: str) -> list[Request]:
        """Return the requests of the run called `name` on the server called `side`: but for the salt, all servers'."""
        if self.salt is None:
            return list(self.requests)
        salt = salt_for(self.salt, side, name)
        return [request if self.leaves(request) else request.salted(salt) for request in self.requests]

    def leaves(self, request: Request) -> bool:
        """Return whether the request is the same in every run."""
        spared = self.spares_groups and (request.group is not None or request.kind == "tokens")
        return self.salt is None or spared

    @property
    def primes_each_run(self) -> bool:
        """Whether groups begin differently in each run, so that they must be read before each."""
        return self.prime and self.salt is not None and not self.spares_groups

    def first(self, count: int) -> "Load":
        """Return this load with its first `count` requests only."""
        return replace(self, requests=self.requests[:count])

    def alone(self, side: str) -> list[Request]:
        """Return a server's requests of the warm-up: from the shortest prompt to the longest at even distances."""
        ordered = sorted(self.of_run("warm-up", side), key=Request.size)
        count = min(self.warm_up, len(ordered))
        places = [round(step * (len(ordered) - 1) / max(1, count - 1)) for step in range(count)]
        return [
            replace(ordered[place], max_tokens=min(ordered[place].max_tokens, self.warm_up_tokens)) for place in places
        ]


@dataclass(slots=True)
class Results:
    """What was measured on one server; `runs` are in the order in which they were done."""

    side: Side
    runs: list[tuple[str, Schedule, Measured]] = field(default_factory=list)

    def figures(self, limits: Limits | None = None, names: Sequence[str] | None = None) -> Figures:
        """Sum up the runs called `names`, or all."""
        measured = [measured for name, _, measured in self.runs if names is None or name in names]
        observed = [one.observed for one in measured]
        together = observed[0] if observed else None
        for one in observed[1:]:
            together = None if together is None or one is None else together.plus(one)
        return figures([one.run for one in measured], together, self.side.unloaded, limits)


async def prepare(side: Side, load: Load, *, stop: asyncio.Event, say: Say) -> None:
    """Have prefixes read and measure requests that the server serves alone; ends early once `stop` is set."""
    alone = load.alone(side.name)
    if load.prime:
        await side.prime(alone if load.primes_each_run else load.requests, stop=stop, say=say)
    await side.warm_up(alone, stop=stop, say=say)
    gap_s = side.unloaded.gap_s
    say(f"{side.name}: a decode iteration takes {'?' if gap_s is None else f'{gap_s * 1e3:.1f}'} ms unloaded")


async def run_once(
    results: Results, load: Load, schedule: Schedule, name: str, *, stop: asyncio.Event, say: Say
) -> Measured | None:
    """Do one run on one server and add it to its results; None if `stop` was set before it began."""
    side, requests = results.side, load.of_run(name, results.side.name)
    if load.primes_each_run:
        await side.prime(requests, stop=stop, say=say)
    if stop.is_set():
        return None

    def report(standing: Standing) -> None:
        say(f"{side.name}, {name}: {standing.line()}")

    measured = await side.run(requests, schedule, stop=stop, report=report)
    results.runs.append((name, schedule, measured))
    return measured


def in_turn(all_results: Sequence[Results], turn: int) -> list[Results]:
    """Return the servers in the order of a turn: as given, and reversed every second time."""
    return list(all_results) if turn % 2 == 0 else list(reversed(all_results))


async def rounds(
    all_results: Sequence[Results],
    load: Load,
    schedule_of: Callable[[int], Schedule],
    count: int,
    *,
    stop: asyncio.Event,
    say: Say,
) -> None:
    """Run on every server in each of `count` rounds; ends early once `stop` is set."""
    for number in range(count):
        for results in in_turn(all_results, number):
            if stop.is_set():
                return
            await run_once(results, load, schedule_of(number), f"round {number + 1}", stop=stop, say=say)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How a server compares with the reference in one figure; above 1 the server is the better one.

    Latencies are of the requests that each of them answered.
    """

    figure: str
    reference: float
    other: float
    better: float


_SMALLER_IS_BETTER = (
    ("ttft_s", "p50"), ("ttft_s", "p99"), ("tbt_s", "p50"), ("tbt_s", "p99"), ("tpot_s", "p50"), ("tpot_s", "p99"),
    ("e2e_s", "p50"), ("e2e_s", "p99"),
)  # fmt: skip


def ratios(reference: Figures, other: Figures) -> list[Ratio]:
    """Compare two servers; a figure that either lacks, or that is 0, is left out."""
    pairs: list[tuple[str, float | None, float | None, bool]] = [
        (f"{name} {part}", getattr(getattr(reference, name), part), getattr(getattr(other, name), part), True)
        for name, part in _SMALLER_IS_BETTER
    ]
    for name in ("requests_per_s", "goodput_per_s", "output_tokens_per_s"):
        pairs.append((name, getattr(reference, name), getattr(other, name), False))
    return [
        Ratio(name, mine, theirs, mine / theirs if smaller else theirs / mine)
        for name, mine, theirs, smaller in pairs
        if mine and theirs
    ]
