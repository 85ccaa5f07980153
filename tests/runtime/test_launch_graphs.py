"""Launches that come again are captured once, and read the tensors of their own step."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import Shape
from tests.kernels.step_checks import check_step
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.runtime import launch_graphs
from vllm_hybrid_sparse.runtime.launch_graphs import CudaCapture, LaunchGraphs
from vllm_hybrid_sparse.runtime.step_rows import RankedRows, room_for

TINY = Shape(head_dim=16, block_tokens=32)


class Relaunched:
    """Stands for a graph over tensors in CPU memory: it launches again exactly what it captured."""

    replays = 0

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch

    def replay(self) -> None:
        Relaunched.replays += 1
        self._launch()


def test_what_comes_a_second_time_is_captured_and_replayed_from_then_on() -> None:
    launched: list[str] = []
    graphs = LaunchGraphs(Relaunched)
    for call in ("first", "second", "third"):
        graphs.run("key", partial(launched.append, call))
    assert launched == ["first", "second", "second"]
    graphs.run("other", lambda: launched.append("other"))
    assert launched[-1] == "other"


def test_without_a_capture_everything_is_launched() -> None:
    launched: list[int] = []
    graphs = LaunchGraphs(None)
    for call in range(3):
        graphs.run("key", partial(launched.append, call))
    assert launched == [0, 1, 2]


def test_a_capture_that_fails_costs_nothing_but_time(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_launch: Callable[[], None]) -> Relaunched:
        raise RuntimeError("operation not permitted when stream is capturing")

    launched: list[int] = []
    graphs = LaunchGraphs(refuse)
    with caplog.at_level(logging.WARNING):
        for call in range(4):
            graphs.run("key", partial(launched.append, call))
    assert launched == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "hybrid_sparse: launches cannot be captured in CUDA graphs (operation not permitted when stream is capturing); "
        "what is not captured yet costs more"
    ]


class CapturingDriver:
    """Stands for torch's graphs and its allocator on the second GPU: writes down what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool, was_told: bool = False) -> None:
        self.told: list[Any] = []
        self._fails, self._was_told = fails, was_told
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: self.told.append(("release", *pool)))

    def end_allocate(self, *pool: Any) -> None:
        if self._was_told:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.told.append(("end", *pool))

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ((0, 7), "thread_local")

    def capture_end(self) -> None:
        if self._fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def launch(self) -> None:
        self.told.append("launch")

    def refuse(self) -> None:
        raise ValueError("something else")


POOL_IS_FREE = [("end", 1, (0, 7)), ("release", 1, (0, 7))]


@pytest.mark.parametrize(("launch", "error"), [("launch", RuntimeError), ("refuse", ValueError)])
def test_the_allocator_learns_of_the_end_of_a_capture_that_the_driver_has_made_invalid(
    launch: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would never reuse memory that other queues have read."""
    driver = CapturingDriver(monkeypatch, fails=True)
    with pytest.raises(error):
        CudaCapture(torch.device("cuda", 1))(getattr(driver, launch))
    assert driver.told[-2:] == POOL_IS_FREE


def test_an_allocator_that_has_learnt_of_the_end_is_told_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cannot be instantiated gives its pool back itself."""
    driver = CapturingDriver(monkeypatch, fails=True, was_told=True)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        CudaCapture(torch.device("cuda", 1))(driver.launch)
    assert driver.told == ["launch"]


def test_a_capture_that_ends_well_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CapturingDriver(monkeypatch, fails=False)
    capture = CudaCapture(torch.device("cuda", 1))
    assert capture(driver.launch) is driver
    with pytest.raises(ValueError, match="something else"):
        capture(driver.refuse)
    assert driver.told == ["launch"]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("resident", [0.0, 0.9])
def test_rows_that_begin_elsewhere_in_the_batch_are_launched_anew(resident: float) -> None:
    settings = {**SMALL, **POLICIES["dense"], "device": "cuda", "device_ranking": "device", "device_pool_pages": 128}
    settings["device_resident_share"] = resident
    with TieredModel(settings, shape=TINY, capture=Relaunched) as model:
        one, late = model.start(), model.start()
        model.step([(one, 70)], decode=False)
        for first in (True, True, True, True, False, False, True):
            rows = [(one, 1), (late, 2)]
            steps = model.step(rows if first else rows[::-1])
            for layer, step in zip(model.layers, steps, strict=True):
                check_step(layer, step)


def keys_run(graphs: LaunchGraphs, keys: str) -> list[tuple[str, int]]:
    """Run some keys one after another; return each run's key and the call in which it was launched or captured."""
    launched: list[tuple[str, int]] = []
    for call, key in enumerate(keys):
        graphs.run(key, partial(launched.append, (key, call)))
    return launched


def test_a_graph_makes_room_when_it_was_not_used_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graphs, "_MOST", 2)
    monkeypatch.setattr(launch_graphs, "_IDLE_RUNS", 5)
    launched = keys_run(LaunchGraphs(Relaunched), "aabbcc" + "aaaa" + "cc" + "bb")
    # There is no room for c until b has been idle for five runs. After that there is none for b, which is launched.
    assert launched[:6] == [("a", 0), ("a", 1), ("b", 2), ("b", 3), ("c", 4), ("c", 5)]
    assert launched[6:10] == [("a", 1)] * 4
    assert launched[10:12] == [("c", 10), ("c", 10)]
    assert launched[12:] == [("b", 12), ("b", 13)]


def test_kinds_that_take_turns_are_not_captured_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graphs, "_MOST", 2)
    monkeypatch.setattr(launch_graphs, "_IDLE_RUNS", 16)
    captured: list[None] = []

    def capture(launch: Callable[[], None]) -> Relaunched:
        captured.append(None)
        return Relaunched(launch)

    launched = keys_run(LaunchGraphs(capture), "abc" * 20)
    assert len(captured) == 2
    assert launched[-3:] == [("a", 3), ("b", 4), ("c", 59)]


def test_kinds_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graphs, "_MOST_MET", 3)
    assert keys_run(LaunchGraphs(Relaunched), "axyzaa")[-2:] == [("a", 4), ("a", 5)]
    assert keys_run(LaunchGraphs(Relaunched), "axyaa")[-2:] == [("a", 3), ("a", 3)]


def test_there_is_room_for_a_number_and_not_much_more() -> None:
    assert room_for(0) == 0
    numbers = [*range(1, 3000), 8191, 8192, 8193, 10**6]
    rooms = [room_for(number) for number in numbers]
    assert all(number <= room <= max(number + 15, number * 9 / 8) for number, room in zip(numbers, rooms, strict=True))
    assert rooms == sorted(rooms)
    assert len(set(rooms[:2999])) < 50


def replaying(policy: dict[str, Any], resident: float = 0.0) -> TieredModel:
    settings = {**SMALL, **policy, "device": "cuda", "device_ranking": "device"}
    settings |= {"device_pool_pages": 128, "device_resident_share": resident}
    return TieredModel(settings, shape=TINY, layers=2, capture=Relaunched)


def check_eight_steps(model: TieredModel, *lengths: int) -> None:
    """Begin requests and decode eight tokens of each, at least three of them by replays; check every step."""
    Relaunched.replays = 0
    requests = [model.start() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        model.step([(request, length)], decode=False)
    excuses = []
    for _ in range(8):
        steps = model.step([(request, 1) for request in requests], sharpness=3.0)
        for layer, step in zip(model.layers, steps, strict=True):
            excuses += check_step(layer, step)
    assert len(excuses) <= 4, excuses
    assert Relaunched.replays >= 2 * 3, "of two layers, three steps at the least"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("policy", "resident"), [("dense", 0.0), ("dense", 0.4), ("dense", 0.9), ("topk-codes", 0.0), ("codes", 0.0)]
)
def test_steps_that_are_replayed_read_their_own_pages(policy: str, resident: float) -> None:
    """The steps cross the end of a block and the ends of pages, which are summarised before the attention."""
    with replaying(POLICIES[policy], resident) as model:
        check_eight_steps(model, 30, 70, 155)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("policy", "length", "number"),
    [
        (POLICIES["dense"], 250, "most_retained"),  # 17 pages from the seventh step on
        (POLICIES["topk-codes"], 315, "most_candidates"),  # 17 from the fifth step on
        ({**POLICIES["topk-codes"], "topk_ratio": 0.9}, 331, "most_budget"),  # 17 of 18, likewise
    ],
)
def test_rows_that_outgrow_what_was_captured_are_launched_anew(
    policy: dict[str, Any], length: int, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of 16 pages leaves out the 17th. Only one number tells: the tensors stay in their places."""
    seen: list[RankedRows] = []
    with replaying(policy) as model:
        ranking = model.tier.ranking
        assert ranking is not None
        rows_of = ranking.rows

        def spy(*step: Any) -> Sequence[RankedRows]:
            parts = rows_of(*step)
            seen.extend(parts)
            return parts

        monkeypatch.setattr(ranking, "rows", spy)
        check_eight_steps(model, length, 30, 70)  # first, so that its 17th page would be taken from the next list
    assert len({rows.held for rows in seen}) == 1
    values = {
        name: [getattr(rows, name) for rows in seen] for name in ("most_retained", "most_candidates", "most_budget")
    }
    assert [name for name, of_steps in values.items() if len(set(of_steps)) > 1] == [number]
    assert (values[number][2], values[number][-1]) == (16, 32), "captured in the third step, and too small in the last"
