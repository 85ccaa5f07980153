"""Slots of requests: each has its own, freed with the state and given again; never more than requests at one time."""

import random

import pytest
import torch

from tests.kernels.hgca_checks import MirroredLayer
from tests.kernels.served_layer import Shape
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.runtime.requests import RequestSlots
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec


class Holder:
    """A layer's states: what was set and not released."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}

    def release(self, slot: int) -> None:
        self.states.pop(slot, None)


def test_a_request_keeps_its_slot_until_it_is_released() -> None:
    requests = RequestSlots()
    assert requests.of(["a", "b"]).tolist() == [0, 1]
    assert requests.of(["b", "c", "a"]).tolist() == [1, 2, 0]
    assert requests.of([]).dtype == torch.int32
    requests.release(["a", "never seen"])
    assert requests.of(["d", "b"]).tolist() == [0, 1]
    assert len(requests) == 3


def test_every_holder_is_told_once() -> None:
    requests, holders = RequestSlots(), [Holder(), Holder()]
    for holder in holders:
        requests.attach(holder)
        holder.states = {0: "a", 1: "b"}
    requests.of(["a", "b"])
    requests.release(["b", "b"])
    assert [holder.states for holder in holders] == [{0: "a"}, {0: "a"}]


def test_a_batch_follows_the_order_of_its_rows() -> None:
    requests, rows = RequestSlots(), ["a", "b", "c"]
    requests.follow(lambda: rows)
    assert requests.of_batch(3).tolist() == [0, 1, 2]
    rows[:] = ["c", "a"]
    assert requests.of_batch(2).tolist() == [2, 0]
    with pytest.raises(KernelError, match="requests=3: the step's batch names 2"):
        requests.of_batch(3)


def advance(requests: RequestSlots, names: list[str], seq_lens: list[int], query_lens: list[int]) -> list[bool]:
    lengths = torch.tensor(seq_lens), torch.tensor(query_lens)
    return list(requests.advance(requests.of(names), *lengths).tolist())


def test_a_state_follows_a_request_step_by_step_and_no_further() -> None:
    requests = RequestSlots()
    assert advance(requests, ["a", "b"], [100, 1], [40, 1]) == [False, False]  # a's first 60 tokens were cached
    assert advance(requests, ["b", "a"], [2, 101], [1, 1]) == [True, True]
    assert advance(requests, ["a", "b"], [101, 3], [0, 1]) == [True, True]  # nothing of a in the step
    assert advance(requests, ["a"], [102], [1]) == [True]
    assert advance(requests, ["c"], [50], [0]) == [False]  # no token of it was ever in a step
    assert advance(requests, ["c"], [51], [1]) == [False]
    requests.release(["a"])
    assert advance(requests, ["a", "b"], [103, 5], [1, 1]) == [False, False]  # a resumes, b has left a token out
    assert advance(requests, ["a", "b"], [104, 6], [1, 1]) == [True, True]


def test_thousands_of_requests_leave_nothing_behind() -> None:
    rng, requests, holder = random.Random(0), RequestSlots(), Holder()
    requests.attach(holder)
    running: dict[str, int] = {}
    most, slots_seen = 0, set[int]()
    for number in range(5000):
        running[f"request {number}"] = -1
        for request_id, slot in zip(running, requests.of(list(running)).tolist(), strict=True):
            assert running[request_id] in (-1, slot)  # its own, and the same as before
            assert holder.states.setdefault(slot, request_id) == request_id  # nobody else's
            running[request_id] = slot
            slots_seen.add(slot)
        assert len(set(running.values())) == len(running)
        most = max(most, len(running))
        ended = [request_id for request_id in running if rng.random() < 0.2]  # finished, aborted or preempted
        requests.release(ended)
        for request_id in ended:
            del running[request_id]
        assert set(holder.states.values()) == set(running)
    assert slots_seen == set(range(most))
    requests.release(list(running))
    assert len(requests) == 0
    assert holder.states == {}


def test_a_preempted_request_that_resumes_answers_like_a_new_one_with_its_tokens() -> None:
    retained, salience = RetainedSet(sink_tokens=16, window_tokens=32), SalienceSpec()
    shape = Shape(num_q_heads=6, head_dim=32, block_tokens=16, summary="none")
    mirror = MirroredLayer(shape, salience, retained)
    assert mirror.layer.hgca is not None
    requests = RequestSlots()
    requests.attach(mirror.layer.hgca)
    tokens = torch.randn(231, 10, 32)
    first = mirror.start()
    assert requests.of(["first"]).tolist() == [first.slot]
    mirror.step((first, 200), tokens=tokens[:200])
    for t in range(200, 230):
        mirror.step((first, 1), tokens=tokens[t : t + 1])
    requests.release(["first"])
    assert mirror.layer.hgca.packed_bytes == 0
    mirror.release(first)

    resumed = mirror.start()
    assert requests.of(["first"]).tolist() == [resumed.slot]
    mirror.step((resumed, 230), tokens=tokens[:230])
    fresh = MirroredLayer(shape, salience, retained)
    new = fresh.start()
    fresh.step((new, 230), tokens=tokens[:230])
    again, expected = (
        layer.step((request, 1), tokens=tokens[230:]).output for layer, request in ((mirror, resumed), (fresh, new))
    )
    assert torch.equal(again, expected)
