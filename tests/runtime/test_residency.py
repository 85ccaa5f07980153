"""Rows whose blocks all lie in frames: read whole, by the device alone, and true to the host store at every step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.served_layer import Request, Shape
from tests.kernels.step_checks import check_step
from tests.runtime.broken_pages import break_pages
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.memory.transfers import FrameFill, Load, Loader
from vllm_hybrid_sparse.runtime import residency
from vllm_hybrid_sparse.runtime.residency import Residency
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import SelectionSpec

pytestmark = pytest.mark.usefixtures("interpreted")

TINY = Shape(head_dim=16, block_tokens=32)
LAYERS, FRAME_SLOTS = 2, 2 * 2 * 2  # layers, KV heads, pages of a block
DEVICES = pytest.mark.parametrize("device", ["emulated", "cuda"])


def model_of(device: str, frames: int = 40, paged: int = 64, **settings: Any) -> TieredModel:
    """A model whose pool has room for `frames` frames and, besides them, `paged` slots for single pages."""
    slots = frames * FRAME_SLOTS + paged
    return TieredModel(
        {
            **SMALL,
            "policy": "dense",
            "device": device,
            "device_pool_pages": slots,
            "device_resident_share": (frames * FRAME_SLOTS + 1) / slots,
            **settings,
        },
        shape=TINY,
        layers=LAYERS,
    )


def of(model: TieredModel) -> Residency:
    assert model.tier.residency is not None
    return model.tier.residency


def begin(model: TieredModel, *lengths: int) -> list[list[Request]]:
    requests = [model.start() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        model.step([(request, length)], decode=False)
    return requests


def decode(model: TieredModel, *requests: list[Request], prompts: Sequence[tuple[list[Request], int]] = ()) -> Any:
    """Run one step and compare all its rows with the references; return which decode rows were resident."""
    steps = model.step([*((request, 1) for request in requests), *prompts])
    assert model.divided is not None
    for layer, step in zip(model.layers, steps, strict=True):
        whole = bool(model.divided.resident.all())
        check_step(layer, replace(step, selection=SelectionSpec()) if whole else step)
    of(model)._blocks.check_integrity()
    check_frames(model, [request for request, stays in zip(requests, model.divided.resident, strict=True) if stays])
    return model.divided.resident.tolist()


def check_frames(model: TieredModel, resident: Sequence[list[Request]]) -> None:
    """Check that the frames of resident requests hold what was appended, bit for bit."""
    for request in resident:
        for index, of_layer in enumerate(request):
            frames = torch.from_numpy(of(model)._blocks.frames_of(torch.tensor(of_layer.blocks).numpy())).long()
            for held, appended in zip(of(model).frames(index), (of_layer.key, of_layer.value), strict=True):
                tokens = held[frames].transpose(1, 2).flatten(0, 1)[: len(appended)]
                assert torch.equal(tokens, appended)


def finish(model: TieredModel, request: list[Request]) -> None:
    for layer, of_layer in zip(model.layers, request, strict=True):
        layer.finish(of_layer)


@DEVICES
def test_rows_are_resident_from_their_second_step_on(device: str) -> None:
    """Requests have every length around pages and blocks, and grow over the ends of both."""
    with model_of(device, frames=60) as model:
        requests = begin(model, 1, 15, 31, 32, 33, 95, 150)
        assert decode(model, *requests) == [False] * 7
        steps = 20 if device == "emulated" else 3  # interpreted kernels are slow
        for _ in range(steps):
            assert decode(model, *requests) == [True] * 7
        stats, read = model.tier.take_stats(), model.tier.take_decode_stats()
        assert stats.blocks_entered >= 1 + 1 + 1 + 1 + 2 + 3 + 5
        assert model.tier.take_stats().blocks_entered == 0
        assert stats.resident_groups == steps * 7 * 2 * LAYERS
        assert stats.groups == stats.resident_groups + 7 * 2 * LAYERS
        assert stats.pages_hit + stats.pages_fetched == stats.pages_wanted
        assert read.selections == stats.groups
        assert read.pages_read == read.pages_total


@DEVICES
@pytest.mark.parametrize("policy", POLICIES)
def test_resident_rows_are_read_whole_whatever_the_policy(device: str, policy: str) -> None:
    with model_of(device, **POLICIES[policy]) as model:
        (request,) = begin(model, 200)
        assert decode(model, request) == [False]
        for _ in range(3):
            assert decode(model, request) == [True]
        model.tier.take_decode_stats()
        decode(model, request)
        read = model.tier.take_decode_stats()
        assert read.pages_read == read.pages_total == 2 * LAYERS * 13
        assert read.share_read == 1.0


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (8, 2)])
def test_every_dtype_and_group(device: str, dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
    shape = Shape(dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=16, head_dim=16)
    settings = {**SMALL, "policy": "dense", "device": device, "device_pool_pages": 256, "device_resident_share": 0.8}
    with TieredModel(settings, shape=shape) as model:
        requests = begin(model, 17, 70)
        assert [decode(model, *requests) for _ in range(3)] == [[False] * 2, [True] * 2, [True] * 2]


@DEVICES
def test_prompts_and_rows_of_two_tiers_beside_them(device: str) -> None:
    with model_of(device) as model:
        one, other = begin(model, 100, 70)
        decode(model, one)
        late = model.start()
        assert decode(model, one, other, prompts=[(late, 60)]) == [True, False]
        assert decode(model, one, other, prompts=[(late, 33)]) == [True, True]
        assert decode(model, other, late, one) == [True, False, True]  # rows of others lie between
        assert decode(model, late, one, other) == [True] * 3


@DEVICES
def test_a_row_that_does_not_fit_waits_until_others_are_gone(device: str) -> None:
    with model_of(device, frames=8) as model:
        one, other = begin(model, 100, 140)
        assert [decode(model, one, other) for _ in range(3)] == [[False, False], [True, False], [True, False]]
        assert of(model)._blocks.free == 0 or model.tier.pool.layer_slots > 64
        finish(model, one)
        assert decode(model, other) == [False]
        assert decode(model, other) == [True]


@DEVICES
def test_a_row_that_can_not_grow_makes_room_for_others(device: str) -> None:
    with model_of(device, frames=8) as model:
        one, other = begin(model, 125, 121)
        assert decode(model, one, other) == [False, False]
        assert [decode(model, one, other) for _ in range(2)] == [[True, True]] * 2
        assert decode(model, one, other) == [False, True]  # 129 tokens, and 8 frames are taken
        for _ in range(3):  # until the other has 128 tokens
            assert decode(model, one, other) == [False, True]
        assert decode(model, one, other) == [False, True]  # the other has one of the first one's frames
        finish(model, other)
        assert decode(model, one) == [False]
        assert decode(model, one) == [True]


@DEVICES
def test_frames_that_nobody_uses_serve_single_pages_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "IDLE_STEPS", 3)
    with model_of(device, frames=6) as model:
        (short,) = begin(model, 60)
        decode(model, short)
        assert decode(model, short) == [True]
        assert model.tier.pool.layer_slots == 64 + 4 * FRAME_SLOTS
        (longer,) = begin(model, 220)
        slots = []
        for _ in range(6):
            assert decode(model, longer) == [False]
            slots.append(model.tier.pool.layer_slots - 64 - 4 * FRAME_SLOTS)
        assert slots[0] == 0
        assert slots[-1] == 2 * FRAME_SLOTS
        assert [decode(model, short) for _ in range(2)] == [[False], [True]]


@DEVICES
def test_frames_whose_slots_are_in_use_are_taken_once_they_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that failed may have left pages pinned."""
    with model_of(device, frames=4) as model:
        (one,) = begin(model, 60)
        pages = page_numbers(0, np.arange(2)[:, None], np.arange(model.tier.pool.shape.capacity_pages // 2))
        source = model.tier.source(model.layers[0].kv_cache)
        load = Load(source=source, pages=pages, unwanted=lambda: np.zeros(2, dtype=np.bool_))
        loaded = model.tier.loader.load(load).result(timeout=10)
        assert loaded.has_slots.all()
        with monkeypatch.context() as pinned:
            pinned.setattr(model, "settle", lambda: None)  # which would see that something is pinned
            assert [decode(model, one) for _ in range(2)] == [[False]] * 2
        model.tier.loader.release(loaded)
        assert [decode(model, one) for _ in range(2)] == [[False], [True]]


@DEVICES
def test_blocks_that_are_used_again_hold_what_was_written_last(device: str) -> None:
    with model_of(device) as model:
        for length in (70, 40, 63, 64):
            (request,) = begin(model, length)
            for steps in range(3):
                assert decode(model, request) == [steps > 0]
            finish(model, request)


@DEVICES
def test_a_prefix_is_held_once(device: str) -> None:
    with model_of(device, frames=5) as model:
        (one,) = begin(model, 70)
        decode(model, one)
        other = model.start()
        for of_layer, of_one in zip(other, one, strict=True):
            of_layer.key, of_layer.value, of_layer.blocks = of_one.key[:64], of_one.value[:64], of_one.blocks[:2]
        model.step([(other, 9)], decode=False)
        assert decode(model, one, other) == [True, False]
        assert decode(model, one, other) == [True, True]
        assert of(model).entered_blocks == 4


@DEVICES
def test_blocks_that_others_write_leave_their_frames(device: str) -> None:
    with model_of(device) as model:
        (one,) = begin(model, 70)
        decode(model, one)
        assert decode(model, one) == [True]
        model.tier.forget_blocks([one[0].blocks[1]])
        assert [decode(model, one) for _ in range(2)] == [[False], [True]]


def resident_in_anothers_blocks(model: TieredModel, another: int, tokens: int) -> list[Request]:
    """A resident request whose next blocks were those of another, which left all of its pages in single slots."""
    (other,) = begin(model, another)
    assert decode(model, other) == [False]
    assert len(other[0].blocks) > of(model)._most_frames
    (one,) = begin(model, tokens)
    finish(model, other)
    assert [decode(model, one) for _ in range(2)] == [[False], [True]]
    return one


@DEVICES
def test_a_block_that_a_resident_row_begins_has_no_page_of_its_last_request_in_a_slot(device: str) -> None:
    """Otherwise the row would read these pages as soon as it is two-tier again."""
    with model_of(device, frames=6, paged=96) as model:
        one = resident_in_anothers_blocks(model, 210, 94)
        assert [decode(model, one) for _ in range(2)] == [[True]] * 2
        assert len(one[0].key) == 98  # a block has begun
        model.tier.forget_blocks(one[0].blocks[:1])
        assert decode(model, one) == [False]


@DEVICES
def test_a_row_that_runs_out_of_frames_reads_what_it_wrote_to_them(device: str) -> None:
    """A block begins and is filled while it is resident, and the next one finds no frame."""
    with model_of(device, frames=2, paged=96) as model:
        one = resident_in_anothers_blocks(model, 100, 30)
        while len(one[0].key) < 64:
            assert decode(model, one) == [True]
        assert [decode(model, one) for _ in range(2)] == [[False]] * 2


def test_a_second_turn_reads_what_a_resident_row_wrote() -> None:
    """The request finds the block in the prefix cache, and its first decode row is two-tier."""
    with model_of("emulated", frames=8, paged=96) as model:
        one = resident_in_anothers_blocks(model, 300, 62)
        while len(one[0].key) < 96:
            assert decode(model, one) == [True]
        turn = model.start()
        for of_layer, of_one in zip(turn, one, strict=True):
            of_layer.key, of_layer.value, of_layer.blocks = of_one.key, of_one.value, list(of_one.blocks)
        model.step([(turn, 9)], decode=False)
        assert decode(model, turn) == [False]
        assert decode(model, turn) == [True]


@DEVICES
def test_blocks_begun_beside_ranked_rows_have_no_old_page_in_a_slot(device: str) -> None:
    """There the device's own directory forgets every page that a decode row begins."""
    with model_of(device, frames=6, paged=96, **POLICIES["codes"], device_ranking="device") as model:
        one = resident_in_anothers_blocks(model, 210, 94)
        while len(one[0].key) < 114:  # the block's second page has begun
            assert decode(model, one) == [True]
        model.tier.forget_blocks(one[0].blocks[:1])
        assert decode(model, one) == [False]


@DEVICES
def test_what_can_not_be_loaded_stays_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of(device, paged=512) as model:
        one, other = begin(model, 70, 100)
        with monkeypatch.context() as broken:
            break_pages(model, {(1, 2 * one[0].blocks[1])}, broken)
            assert decode(model, one, other) == [False, False]
            failures = model.tier.failures
            assert decode(model, one, other) == [False, False]  # the two entered together
            assert model.tier.failures > failures
        decode(model, one, other)
        failures = model.tier.failures
        assert decode(model, one, other) == [True, True]
        assert model.tier.failures == failures  # each is counted once


@DEVICES
def test_a_step_that_ended_early_leaves_no_block_in_a_frame(device: str) -> None:
    with model_of(device) as model:
        (one,) = begin(model, 70)
        decode(model, one)
        of(model)._entrance._fills.popitem()  # as if one layer had not been attended
        assert [decode(model, one) for _ in range(2)] == [[False], [True]]
        assert of(model).entered_blocks == 3


class Slowly:
    """A mark that has passed only when the test says so."""

    def __init__(self) -> None:
        self.has_passed = False

    def wait(self) -> None:
        """Does not wait."""

    def passed(self) -> bool:
        return self.has_passed


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Slowly:
    """The mark behind copies to frames, which are in fact done at once. A step waits for one block, not for more."""
    monkeypatch.setattr(residency, "AWAITED_BYTES", 0)
    fill_frames, mark = Loader._fill_frames, Slowly()

    def filled(self: Loader, fill: FrameFill) -> Any:
        fill_frames(self, fill)
        return mark

    monkeypatch.setattr(Loader, "_fill_frames", filled)
    return mark


@DEVICES
def test_no_step_waits_for_many_blocks(device: str, slowly: Slowly) -> None:
    """The rows are read on two tiers, and grow, until all their blocks but the last have arrived."""
    with model_of(device) as model:
        one, other = begin(model, 100, 120)
        assert [decode(model, one) for _ in range(3)] == [[False]] * 3
        assert decode(model, one, other) == [False, False]
        assert of(model).entered_blocks == 0
        slowly.has_passed = True
        assert [decode(model, one) for _ in range(2)] == [[False], [True]]
        assert of(model).entered_blocks == 4
        assert [decode(model, one, other) for _ in range(3)] == [[True, False], [True, False], [True, True]]
        assert of(model).entered_blocks == 8


@DEVICES
def test_resident_rows_do_not_follow_copies_under_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "AWAITED_BYTES", 0)
    marks: list[Slowly] = []
    fill_frames = Loader._fill_frames

    def filled(self: Loader, fill: FrameFill) -> Any:
        fill_frames(self, fill)
        marks.append(Slowly())
        return marks[-1]

    monkeypatch.setattr(Loader, "_fill_frames", filled)
    with model_of(device) as model:
        short, long = begin(model, 10, 100)
        assert [decode(model, short) for _ in range(2)] == [[False], [True]]
        of_short = len(marks)
        for _ in range(3):
            assert decode(model, short, long) == [True, False]
            assert model.divided is not None
            assert model.divided.rows is not None
            assert model.divided.rows.ready in marks[:of_short]
        assert len(marks) > of_short
        for mark in marks:
            mark.has_passed = True
        assert [decode(model, short, long) for _ in range(3)][-1] == [True, True]


@DEVICES
def test_requests_with_few_and_with_many_blocks_enter_in_turns(device: str, slowly: Slowly) -> None:
    slowly.has_passed = True
    with model_of(device) as model:
        longer, *short = begin(model, 100, 20, 20, 20)
        steps = [decode(model, longer, *short) for _ in range(7)]
        assert [sum(step) for step in steps] == [0, 1, 1, 2, 3, 4, 4]
        assert steps[-3][0]


@DEVICES
def test_blocks_under_way_that_others_write_are_waited_for(device: str, slowly: Slowly) -> None:
    with model_of(device) as model:
        (one,) = begin(model, 100)
        assert decode(model, one) == [False]
        model.tier.forget_blocks([one[0].blocks[1]])
        assert of(model).entered_blocks == 3
        assert [decode(model, one) for _ in range(3)] == [[False], [False], [False]]
        slowly.has_passed = True
        assert [decode(model, one) for _ in range(2)] == [[False], [True]]


@DEVICES
def test_what_ended_under_way_keeps_its_frames_until_it_has_arrived(device: str, slowly: Slowly) -> None:
    with model_of(device, frames=6) as model:
        one, other = begin(model, 150, 100)
        assert decode(model, one) == [False]
        frames = of(model)._blocks.frames_of(of(model)._entrance.blocks).tolist()
        assert len(frames) == 4
        finish(model, one)
        assert [decode(model, other) for _ in range(2)] == [[False]] * 2
        assert of(model)._blocks.frames_of(of(model)._entrance.blocks).tolist() == frames
        slowly.has_passed = True
        assert [decode(model, other) for _ in range(3)] == [[False], [False], [True]]


@DEVICES
def test_a_row_that_grows_takes_no_frame_of_a_block_under_way(device: str, slowly: Slowly) -> None:
    slowly.has_passed = True
    with model_of(device, frames=5) as model:
        (one,) = begin(model, 55)
        while decode(model, one) != [True]:
            assert len(one[0].key) < 64
        slowly.has_passed = False
        (other,) = begin(model, 100)
        while len(one[0].key) < 70:  # a block begins at token 64
            decode(model, one, other)
            under_way = of(model)._entrance.blocks
            assert len(under_way)
            assert (of(model)._blocks.frames_of(under_way) >= 0).all()
        slowly.has_passed = True


def test_a_device_with_room_for_everything_has_a_frame_for_every_block() -> None:
    with model_of("cuda") as model:
        kernel, kv_caches = model.layers[0].tiered_attention, [layer.kv_cache for layer in model.layers]
        settings = HybridSparseConfig(**SMALL, policy="dense", device="cuda")
        assert settings.device_resident_share == 0.75
        with DeviceTier(settings, kv_caches, kernel, device=torch.device("cpu"), device_bytes=2**40) as tier:
            assert tier.pool.shape.capacity_pages == -(-40 * FRAME_SLOTS * 4 // 3)
            assert tier.residency is not None
            assert tier.residency._most_frames == 40


def test_no_row_is_resident_where_no_frame_fits(caplog: pytest.LogCaptureFixture) -> None:
    settings = {**SMALL, "policy": "dense", "device_pool_pages": 64, "device_resident_share": 0.1}
    with TieredModel(settings, shape=TINY, layers=LAYERS) as model:
        assert model.tier.residency is None
        assert "device_resident_share=0.1: a block of all layers takes 8 of the 64 slots" in caplog.text


@pytest.mark.parametrize(("device", "seed"), [("emulated", 0), ("emulated", 1), ("emulated", 2), ("cuda", 3)])
def test_requests_that_come_and_go_as_they_like(device: str, seed: int, slowly: Slowly) -> None:
    """Prompts, steps of some requests, ends, and blocks written elsewhere come in any order, and frames are scarce."""
    random = torch.Generator().manual_seed(seed)

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=random))

    with model_of(device, frames=10) as model:
        running: list[list[Request]] = []
        was_resident = 0
        for _ in range(120 if device == "emulated" else 30):
            slowly.has_passed = draw(3) == 0
            if len(running) < 4 and draw(3) == 0:
                running += begin(model, 1 + draw(150))
            elif running and draw(8) == 0:
                finish(model, running.pop(draw(len(running))))
            elif running and draw(10) == 0:
                model.tier.forget_blocks([running[0][0].blocks[0]])
            elif running:
                was_resident += sum(decode(model, *[request for request in running if draw(4)] or running[:1]))
        assert was_resident > (40 if device == "emulated" else 5)


def test_frames_leave_the_slots_that_a_group_needs() -> None:
    """Of 40 slots a share of 0.95 would be four frames, and 8 slots would be left for two microbatches of 8 pages."""
    settings = {**SMALL, "policy": "dense", "device_pool_pages": 40, "device_resident_share": 0.95}
    with TieredModel(settings, shape=TINY, layers=LAYERS) as model:
        one, other = begin(model, 100, 200)
        assert [decode(model, one, other) for _ in range(3)] == [[False, False]] * 3
        assert model.tier.take_stats().failed_loads == 0
