"""Launches that come again are captured once, and what they read is the step's own."""

import logging
from collections.abc import Callable

import pytest

from tests.kernels.served_layer import Shape
from tests.kernels.step_checks import check_step
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.runtime import launch_graphs
from vllm_hybrid_sparse.runtime.launch_graphs import LaunchGraphs
from vllm_hybrid_sparse.runtime.step_rows import room_for

TINY = Shape(head_dim=16, block_tokens=32)


class Relaunched:
    """Stands for a graph over tensors in CPU memory: it launches what it was captured of, as that was."""

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
        graphs.run("key", lambda call=call: launched.append(call))  # type: ignore[misc]
    assert launched == ["first", "second", "second"]
    graphs.run("other", lambda: launched.append("other"))
    assert launched[-1] == "other"


def test_without_a_capture_everything_is_launched() -> None:
    launched: list[int] = []
    graphs = LaunchGraphs(None)
    for call in range(3):
        graphs.run("key", lambda call=call: launched.append(call))  # type: ignore[misc]
    assert launched == [0, 1, 2]


def test_a_capture_that_fails_costs_nothing_but_time(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_launch: Callable[[], None]) -> Relaunched:
        raise RuntimeError("operation not permitted when stream is capturing")

    launched: list[int] = []
    graphs = LaunchGraphs(refuse)
    with caplog.at_level(logging.WARNING):
        for call in range(4):
            graphs.run("key", lambda call=call: launched.append(call))  # type: ignore[misc]
    assert launched == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "hybrid_sparse: launches cannot be captured in CUDA graphs (operation not permitted when stream is capturing); "
        "they cost more now"
    ]


def test_the_graph_replayed_longest_ago_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_graphs, "_MOST", 2)
    launched: list[tuple[str, int]] = []
    graphs = LaunchGraphs(Relaunched)
    for call, key in enumerate("aabbacaa"):
        graphs.run(key, lambda key=key, call=call: launched.append((key, call)))  # type: ignore[misc]
    # b makes room for c, and a stays: what was captured of it in the second call runs in all that follow.
    assert launched == [("a", 0), ("a", 1), ("b", 2), ("b", 3), ("a", 1), ("c", 5), ("a", 1), ("a", 1)]


def test_there_is_room_for_a_number_and_not_much_more() -> None:
    assert room_for(0) == 0
    numbers = [*range(1, 3000), 8191, 8192, 8193, 10**6]
    rooms = [room_for(number) for number in numbers]
    assert all(number <= room <= max(number + 15, number * 9 / 8) for number, room in zip(numbers, rooms, strict=True))
    assert rooms == sorted(rooms)
    assert len(set(rooms[:2999])) < 50


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("policy", "resident"), [("dense", 0.0), ("dense", 0.4), ("dense", 0.9), ("topk-codes", 0.0), ("codes", 0.0)]
)
def test_steps_that_are_replayed_read_their_own_pages(policy: str, resident: float) -> None:
    """Over the ends of pages, which are summarised before the attention, and of a block."""
    settings = {**SMALL, **POLICIES[policy], "device": "cuda", "device_ranking": "device"}
    settings |= {"device_pool_pages": 128, "device_resident_share": resident}
    Relaunched.replays = 0
    with TieredModel(settings, shape=TINY, layers=2, capture=Relaunched) as model:
        requests = [model.start() for _ in range(3)]
        for request, length in zip(requests, (30, 70, 155), strict=True):
            model.step([(request, length)], decode=False)
        excuses = []
        for _ in range(8):
            steps = model.step([(request, 1) for request in requests], sharpness=3.0)
            for layer, step in zip(model.layers, steps, strict=True):
                excuses += check_step(layer, step)
        assert len(excuses) <= 4, excuses
    assert Relaunched.replays >= 2 * 3, "of two layers, three steps at the least"
