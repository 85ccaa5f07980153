"""Servers in turns, in virtual time."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from tests.load.model_server import ModelSide, simple_requests
from tests.load.virtual_time import run_virtually
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import ClosedLoop, poisson
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.side import Say
from vllm_hybrid_sparse.load.turns import Load, Results, in_turn, ratios, rounds


def unsalted(side: ModelSide) -> list[Request]:
    """Return the requests that a server was sent, without the salt."""
    return [replace(one, prompt=str(one.prompt).rpartition("\n")[2]) for one in side.server.asked]


def a_load(**changes: object) -> Load:
    settings: dict[str, object] = {"requests": tuple(simple_requests(6)), "salt": "s", "prime": False}
    return Load(**(settings | changes))  # type: ignore[arg-type]


def in_rounds(load: Load, count: int, *sides: ModelSide, stop: asyncio.Event | None = None) -> list[Results]:
    all_results = [Results(side) for side in sides]  # type: ignore[arg-type]
    work = rounds(
        all_results,
        load,
        lambda number: poisson(1.0, len(load.requests), number),
        count,
        stop=stop or asyncio.Event(),
        say=lambda _line: None,
    )
    run_virtually(work)
    return all_results


def test_order_alternates_by_turn() -> None:
    one, two, three = (Results(ModelSide(name)) for name in ("one", "two", "three"))  # type: ignore[arg-type]
    assert in_turn([one, two, three], 0) == [one, two, three]
    assert in_turn([one, two, three], 1) == [three, two, one]
    assert in_turn([one, two, three], 2) == [one, two, three]


def test_servers_get_the_same_requests_at_the_same_times() -> None:
    slow, fast = ModelSide("slow", prefill_s=2.0), ModelSide("fast", prefill_s=0.1)
    in_slow, in_fast = in_rounds(a_load(), 2, slow, fast)
    assert unsalted(slow) == unsalted(fast) == simple_requests(6) * 2
    assert [name for name, _, _ in in_slow.runs] == ["round 1", "round 2"]
    for (_, mine, one), (_, theirs, other) in zip(in_slow.runs, in_fast.runs, strict=True):
        assert mine == theirs
        assert [record.due_s for record in one.run.records] == [record.due_s for record in other.run.records]
    assert in_slow.runs[0][1] != in_slow.runs[1][1]


def test_a_salt_sets_runs_apart_and_not_requests() -> None:
    side = ModelSide("side")
    in_rounds(a_load(), 2, side)
    beginnings = Counter(str(request.prompt).partition("prompt")[0] for request in side.server.asked)
    assert sorted(beginnings.values()) == [6, 6]
    unsalted = ModelSide("unsalted")
    in_rounds(a_load(salt=None), 2, unsalted)
    assert [request.prompt for request in unsalted.server.asked] == [r.prompt for r in simple_requests(6)] * 2


def test_two_names_of_one_server_share_no_prefix() -> None:
    """Nor do two servers with a common store of keys and values."""
    one, other = ModelSide("one"), ModelSide("other")
    in_rounds(a_load(), 1, one, other)
    for mine, theirs in zip(one.server.asked, other.server.asked, strict=True):
        assert mine.prompt != theirs.prompt
    load = a_load()
    assert {request.prompt for request in load.alone("one")}.isdisjoint(r.prompt for r in load.alone("other"))


@pytest.mark.parametrize(("salt", "primed"), [("s", [6, 6]), (None, [])])
def test_what_no_run_finds_cached_is_read_before_each(salt: str | None, primed: list[int]) -> None:
    side = ModelSide("side")
    in_rounds(a_load(salt=salt, prime=True), 2, side)
    assert side.primed == primed


def test_what_is_to_be_found_cached_may_be_spared_the_salt() -> None:
    side = ModelSide("side")
    grouped, alone = Request(prompt="a text. why?", max_tokens=2, group="a"), Request(prompt="prompt", max_tokens=2)
    ids = Request(prompt=(1, 2), max_tokens=2)
    load = a_load(requests=(grouped, alone, ids), prime=True, spares_groups=True)
    in_rounds(load, 2, side)
    assert side.primed == []  # once before the first run is enough
    prompts = [request.prompt for request in side.server.asked]
    assert prompts[0] == prompts[3] == grouped.prompt
    assert prompts[2] == prompts[5] == ids.prompt
    assert len({prompts[1], prompts[4], alone.prompt}) == 3
    assert [load.leaves(request) for request in load.requests] == [True, False, True]


def test_nothing_runs_after_an_interruption() -> None:
    stop = asyncio.Event()
    stop.set()
    (results,) = in_rounds(a_load(), 3, ModelSide("side"), stop=stop)
    assert results.runs == []


def test_nothing_runs_that_was_interrupted_while_documents_were_read() -> None:
    stop = asyncio.Event()

    class Interrupted(ModelSide):
        async def prime(self, requests: list[Request], *, stop: asyncio.Event, say: Say) -> None:
            await super().prime(requests, stop=stop, say=say)
            stop.set()

    (results,) = in_rounds(a_load(prime=True), 3, Interrupted("side"), stop=stop)
    assert results.runs == []


def test_figures_of_several_runs_are_pooled_or_chosen() -> None:
    (results,) = in_rounds(a_load(), 2, ModelSide("side"))
    assert results.figures().planned == 12
    assert results.figures(names=["round 2"]).planned == 6


def test_ratios_are_above_one_where_the_other_is_better() -> None:
    slow, fast = in_rounds(a_load(), 1, ModelSide("slow", prefill_s=2.0), ModelSide("fast", prefill_s=0.5))
    better = {ratio.figure: ratio.better for ratio in ratios(slow.figures(), fast.figures())}
    assert better["ttft_s p50"] > 1
    assert better["requests_per_s"] > 1
    assert "goodput_per_s" not in better  # no limits were given
    back = {ratio.figure: ratio.better for ratio in ratios(fast.figures(), slow.figures())}
    assert back["ttft_s p50"] == pytest.approx(1 / better["ttft_s p50"])


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 5]), (3, [0, 2, 5]), (9, [0, 1, 2, 3, 4, 5])])
def test_warm_up_spreads_over_the_lengths(count: int, places: list[int]) -> None:
    requests = [Request(prompt="x" * (10 * (number + 1)), max_tokens=500) for number in (3, 0, 5, 1, 4, 2)]
    alone = a_load(requests=tuple(requests), salt=None, warm_up=count).alone("side")
    assert [len(request.prompt) // 10 - 1 for request in alone] == places
    assert {request.max_tokens for request in alone} == {64}


@pytest.mark.parametrize("changes", [{"requests": ()}, {"warm_up": 0}, {"warm_up_tokens": 1}])
def test_a_load_without_requests_or_warm_up_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        a_load(**changes)


def test_closed_loops_can_be_run_in_rounds() -> None:
    results = Results(ModelSide("side"))  # type: ignore[arg-type]
    stop = asyncio.Event()
    run_virtually(rounds([results], a_load(), lambda _: ClosedLoop(2), 1, stop=stop, say=lambda _line: None))
    assert results.figures().all_answered
