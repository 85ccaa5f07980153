"""The order of queues, without a GPU: no work on a GPU may overlap with work that writes what it reads."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.kernels.fluxion_checks import constant_predictor
from tests.runtime.clocked_queues import ClockedMark, watch
from tests.runtime.test_cuda_layer import model_of
from tests.runtime.test_step import POLICIES, serve, smallest_pool
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.kernels.fluxion.native import fluxion_layer, native_predictor
from vllm_hybrid_sparse.memory import transfers
from vllm_hybrid_sparse.memory.cuda_pool import CudaPool
from vllm_hybrid_sparse.memory.transfers import Loader
from vllm_hybrid_sparse.memory.write_through import WriteThrough
from vllm_hybrid_sparse.runtime import prefill
from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers

pytestmark = pytest.mark.usefixtures("interpreted")


def busy(model: TieredModel) -> None:
    """Run chunks and decode rows, with a pool that gives every slot to another page all the time."""
    serve(model, (150,), steps=2)
    one, other = model.start(), model.start()
    model.step([(one, 70)], decode=False)
    for tokens in (40, 90, 30, 1):  # the third has context for more parts than there are halves to stage them in
        model.step([(other, tokens), (one, 1)])


@pytest.mark.parametrize("host_share", ["none", "queue"])
@pytest.mark.parametrize("policy", ["dense", "codes"])
def test_nothing_runs_beside_what_it_must_follow(policy: str, host_share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STAGED_PAGES", 2)
    machine = watch(monkeypatch)
    settings = {**POLICIES[policy], "host_share": host_share}
    with model_of({**settings, "device_pool_pages": smallest_pool(settings)}, layers=2) as model:
        busy(model)
    assert machine.races == []
    assert machine.accesses > 50


def test_salient_tokens_are_judged_and_packed_once_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = watch(monkeypatch)
    settings = {"policy": "hgca", "hgca_beta": 1.0, "device_pool_pages": 16}
    with model_of(settings, layers=2) as model:
        for layer in model.layers:
            layer.looks_back_at_once = False
        one, other = model.start(), model.start()
        model.step([(one, 150)], decode=False)
        for tokens in (70, 40, 9, 1):
            model.step([(other, tokens), (one, 1)])
    assert machine.races == []
    assert machine.accesses > 50


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_chooses_by_what_has_been_attended(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> None:
    """If the host does not wait for that, it is noticed."""
    machine = watch(monkeypatch)
    settings = {"policy": "fluxion", "dense_tokens": 0, "device_pool_pages": 16, "host_share": "queue"}
    with model_of(settings, layers=2) as model:
        for index, layer in enumerate(model.layers):
            layer.looks_back_at_once = False
            layer.fluxion = fluxion_layer(native_predictor(constant_predictor(0.5)), layer=index, tau=0.1)
        if not waits:
            monkeypatch.setattr(ClockedMark, "wait", nothing)
        one, other = model.start(), model.start()
        model.step([(one, 150)], decode=False)
        for tokens in (70, 40, 9, 1):
            model.step([(other, tokens), (one, 1)])
    assert machine.accesses > 50
    assert any(race.startswith("the host may run beside bring") for race in machine.races) is not waits
    assert bool(machine.races) is not waits


def come_and_go(model: TieredModel) -> None:
    """Requests enter frames, grow, give them up for others and for single pages, and become two-tier rows again."""
    one, other = model.start(), model.start()
    model.step([(one, 60)], decode=False)
    model.step([(one, 1), (other, 60)])
    for _ in range(4):
        model.step([(one, 1), (other, 1)])
    late = model.start()
    model.step([(one, 1), (late, 40)])
    for rows in ([one, late], [late, other], [late, other], [one], [one, other, late]):
        model.step([(request, 1) for request in rows])


RESIDENT = {**POLICIES["dense"], "device_pool_pages": 80, "device_resident_share": 0.5}  # five frames of eight slots


def test_frames_are_filled_and_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = watch(monkeypatch)
    with model_of(RESIDENT, layers=2) as model:
        come_and_go(model)
        stats = model.tier.take_stats()
    assert stats.resident_groups > 0
    assert stats.blocks_entered > 5  # so frames had several blocks in turn
    assert machine.races == []
    assert machine.accesses > 50


def nothing(self: Any, *_: Any) -> None:
    """Do nothing, in place of a method that keeps an order."""


def nothing_ready(self: Any, fill: Any) -> None:
    """Make the loader say that its copies to frames are done as soon as they are launched."""
    fill_frames(self, fill)


fill_frames = Loader._fill_frames


@pytest.mark.parametrize(
    ("owner", "name", "broken", "race"),
    [
        (Loader, "_fill_frames", nothing_ready, "attend_frames may run beside load_pages"),
        (ClockedMark, "wait", nothing, "load_pages may run beside attend_frames"),
    ],
)
def test_frames_that_are_taken_too_early_are_noticed(
    owner: type, name: str, broken: Any, race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = watch(monkeypatch)
    monkeypatch.setattr(owner, name, broken)
    with model_of(RESIDENT, layers=2) as model:
        come_and_go(model)
    assert any(found.startswith(race) for found in machine.races)


@pytest.mark.parametrize("settings", [RESIDENT, {**RESIDENT, "device_ranking": "device"}], ids=["host", "device"])
def test_a_frame_that_is_half_filled_goes_to_another_block_behind_its_copies(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's second copy fails. In the next step a resident row begins a block in the frame."""
    machine = watch(monkeypatch)
    monkeypatch.setattr(transfers, "COPY_PAGES", 2)  # the pages of one KV head
    with model_of(settings, layers=2) as model:
        pool, residency = model.tier.pool, model.tier.residency
        assert residency is not None
        one, other = model.start(), model.start()
        model.step([(one, 61)], decode=False)
        model.step([(one, 1)])
        model.step([(one, 1), (other, 10)])
        frames = []

        def half_way(self: Loader, fill: Any) -> Any:
            frames.extend(fill.frames.tolist())
            copies = [OSError("uncorrectable memory error"), pool.fill] if fill.layer == 1 else [pool.fill] * 2

            def next_copy(*given: Any) -> None:
                copy = copies.pop()
                if isinstance(copy, OSError):
                    raise copy
                copy(*given)

            with patch.object(pool, "fill", next_copy):
                return fill_frames(self, fill)

        with monkeypatch.context() as broken:
            broken.setattr(Loader, "_fill_frames", half_way)
            model.step([(one, 1), (other, 1)])
        model.step([(one, 1)])
        assert len(one[0].key) == 65
        assert residency._blocks.frames_of(np.array(one[0].blocks[-1:])).tolist() == frames[-1:]
        assert model.tier.failures == 1
    assert machine.races == []
    assert machine.accesses > 50


def no_mark(self: Any) -> None:
    """Make the pool say that its copies are done as soon as they are launched."""


@pytest.mark.parametrize(
    ("owner", "names", "broken", "race"),
    [
        (CudaPool, ("mark",), no_mark, "attend_slots may run beside load_pages"),
        (CudaLayers, ("_give_back",), nothing, "the next piece of the graph may run beside store"),
        (CudaLayers, ("_settle", "_give_back"), nothing, "the host may run beside store_"),
    ],
)
def test_what_is_left_out_is_noticed(
    owner: type, names: tuple[str, ...], broken: Any, race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = watch(monkeypatch)
    for name in names:
        monkeypatch.setattr(owner, name, broken)
    with model_of({**POLICIES["dense"], "device_pool_pages": 64}) as model:
        request = model.start()
        model.step([(request, 40)], decode=False)
        model.step([(request, 1)])
    assert any(found.startswith(race) for found in machine.races)


RANKED = {**POLICIES["codes"], "device_ranking": "device", "device_pool_pages": 64}
RANKED_AND_RESIDENT = {**RANKED, "device_pool_pages": 80, "device_resident_share": 0.5}


def ranked(model: TieredModel) -> None:
    """Run rows with candidates, with and without prompts in the same step."""
    one, other = model.start(), model.start()
    model.step([(one, 190)], decode=False)
    model.step([(one, 1)])  # without a prompt, whose stores would come after the codes
    for tokens in (40, 90, 1):
        model.step([(other, tokens), (one, 1)])


@pytest.mark.parametrize("settings", [RANKED, RANKED_AND_RESIDENT])
def test_what_the_device_ranks_and_reads_is_there(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = watch(monkeypatch)
    with model_of(settings, layers=2) as model:
        ranked(model)
        come_and_go(model)
        stats = model.tier.take_stats()
    assert stats.ranked_groups > 0
    assert (stats.resident_groups > 0) is ("device_resident_share" in settings)
    assert machine.races == []
    assert machine.accesses > 50


@pytest.mark.parametrize("follows", [True, False])
def test_slots_of_frames_are_given_back_behind_the_copies_to_them(
    monkeypatch: pytest.MonkeyPatch, *, follows: bool
) -> None:
    """The request ended as soon as it had entered. If its slots are given back at once, it is noticed."""
    machine = watch(monkeypatch)
    with model_of(RANKED_AND_RESIDENT, layers=2) as model:
        one, longer = model.start(), model.start()
        model.step([(longer, 200)], decode=False)  # more than all frames
        model.step([(one, 150)], decode=False)
        model.step([(one, 1)])
        for layer, of_layer in zip(model.layers, one, strict=True):
            layer.finish(of_layer)
        if not follows:
            residency = model.tier.residency
            assert residency is not None
            give_back = residency._slots.give_back
            monkeypatch.setattr(residency, "_give_back", lambda: give_back(*freed(residency)))
        another = model.start()
        model.step([(longer, 1), (another, 150)])
        for _ in range(3):
            model.step([(longer, 1)])
    assert machine.accesses > 50
    assert bool(machine.races) is not follows, machine.races[:5]


def freed(residency: Any) -> Any:
    """Give up the frames that nobody has: their first slots, and the number of slots of each."""
    numbers = residency._blocks.give_up(0)
    residency._unused += numbers
    return np.array(numbers, dtype=np.int32) * np.int32(residency.shape.slots), residency.shape.slots


@pytest.mark.parametrize(
    ("owner", "name", "race"),
    [
        (WriteThrough, "follow_codes", "score_codes may run beside encode_pages"),
        (CudaPool, "follow", "load_pages may run beside store_tokens"),
    ],
)
def test_what_the_device_would_rank_too_early_is_noticed(
    owner: type, name: str, race: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = watch(monkeypatch)
    monkeypatch.setattr(owner, name, nothing)
    with model_of(RANKED_AND_RESIDENT, layers=2) as model:
        ranked(model)
    assert any(found.startswith(race) for found in machine.races), machine.races[:5]
