"""Rows whose pages the device chooses by itself: the same attention as the references, and nobody is asked."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import Request, Shape
from tests.kernels.step_checks import check_step
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, pack_codes
from vllm_hybrid_sparse.kernels.listed_attention.state import Tally
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.runtime import ranking
from vllm_hybrid_sparse.runtime.ranking import DeviceRanking, ShownTally, rows_at_once
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import SelectionSpec

pytestmark = pytest.mark.usefixtures("interpreted")

TINY = Shape(head_dim=16, block_tokens=32)
RANKED = {name: POLICIES[name] for name in ("dense", "topk-codes", "everything", "codes")}
LENGTHS = (1, 16, 17, 49, 158)


DEVICES = pytest.mark.parametrize("device", ["emulated", "cuda"])


def model_of(device: str, settings: dict[str, Any], **options: Any) -> TieredModel:
    ranked = {"device": device, "device_ranking": "device", "device_pool_pages": 128}
    return TieredModel({**SMALL, **ranked, **settings}, **{"shape": TINY, **options})


def ranking_of(model: TieredModel) -> DeviceRanking:
    assert model.tier.ranking is not None
    return model.tier.ranking


def begin(model: TieredModel, *lengths: int) -> list[list[Request]]:
    requests = [model.start() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        model.step([(request, length)], decode=False)
    return requests


def decode(
    model: TieredModel, *requests: list[Request], prompts: Sequence[tuple[list[Request], int]] = (), **options: Any
) -> list[str]:
    """One step, every row of which is compared with the references; the excuses of `check_step`."""
    steps = model.step([*((request, 1) for request in requests), *prompts], **options)
    check_slots(model)
    return [excuse for layer, step in zip(model.layers, steps, strict=True) for excuse in check_step(layer, step)]


def check_slots(model: TieredModel) -> None:
    """What is said to lie in slots is what the host store has, bit for bit."""
    state = ranking_of(model).directory.state
    for index, layer in enumerate(model.layers):
        source = model.tier.source(layer.kv_cache)
        entries = state.slots.view(len(model.layers), source.num_kv_heads, -1)[index]
        heads, pages = (entries >= 0).nonzero().unbind(1)
        for held, stored in zip(
            (model.tier.pool.key, model.tier.pool.value),
            source.read(page_numbers(index, heads.numpy(), pages.numpy())),
            strict=True,
        ):
            assert torch.equal(held[entries[heads, pages].long()], stored)


def check_codes(model: TieredModel, *requests: list[Request]) -> None:
    """The codes of every full page are those of its keys, but for a rounding here and there."""
    codes = ranking_of(model)._codes
    assert codes is not None
    for index, layer in enumerate(model.layers):
        of_block = layer.shape.block_tokens // 16
        for request in (of_layers[index] for of_layers in requests):
            full = len(request.key) // 16
            pages = [request.blocks[page // of_block] * of_block + page % of_block for page in range(full)]
            for head in range(layer.shape.num_kv_heads if full else 0):
                keys = request.key[: 16 * full, head]
                wanted = pack_codes(encode_keys(keys, codes.code_bits), keys.element_size())
                assert float((codes.codes[index, head, pages] != wanted).float().mean()) < 0.01


@DEVICES
@pytest.mark.parametrize("policy", RANKED)
def test_rows_are_those_of_the_references(device: str, policy: str) -> None:
    """Prompts in chunks and of one token, then steps over the ends of pages and blocks."""
    with model_of(device, RANKED[policy]) as model:
        requests = begin(model, *LENGTHS)
        excuses = [excuse for _ in range(3) for excuse in decode(model, *requests, sharpness=3.0)]
        assert len(excuses) <= 3, excuses
        if policy != "dense":
            check_codes(model, *requests)
        stats, read = model.tier.take_stats(), model.tier.take_decode_stats()
        groups = 3 * len(LENGTHS) * 2
        assert (stats.groups, stats.ranked_groups, read.selections) == (groups, groups, groups)
        assert stats.pages_hit + stats.pages_fetched == stats.pages_wanted == read.pages_read
        assert stats.device_busy_s == stats.step_s == stats.groups_on_host == 0
        if policy == "codes":
            assert 0.9 * stats.looked_groups < stats.kept_mass <= stats.looked_groups
            assert 0 < stats.looked_groups < groups  # those without candidates are not looked at
        else:
            assert stats.looked_groups == 0


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_tokens"), [(2, 2, 16, 16), (3, 1, 64, 32), (8, 2, 32, 128)]
)
def test_every_dtype_and_group(
    device: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, block_tokens: int
) -> None:
    shape = Shape(dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=block_tokens, head_dim=head_dim)
    with model_of(device, RANKED["codes"], shape=shape) as model:
        requests = begin(model, 17, 150)
        assert len([excuse for _ in range(2) for excuse in decode(model, *requests)]) <= 2


@DEVICES
@pytest.mark.parametrize("slots", [32])
@pytest.mark.parametrize("policy", ["dense", "everything"])
def test_a_pool_that_is_too_small_stays_exact(device: str, policy: str, slots: int) -> None:
    with model_of(device, {**RANKED[policy], "device_pool_pages": slots}, layers=2) as model:
        requests = begin(model, 150, 60)
        for _ in range(4):
            decode(model, *requests)
        stats = model.tier.take_stats()
        assert 0 < stats.pages_hit < stats.pages_wanted / 2


@DEVICES
def test_what_was_read_is_found_in_slots_from_the_next_step_on(device: str) -> None:
    with model_of(device, RANKED["dense"], layers=2) as model:
        (request,) = begin(model, 150)
        for _ in range(3):
            decode(model, request)
        model.tier.take_stats()
        decode(model, request)
        decode(model, request)
        stats = model.tier.take_stats()
        # Of ten pages all but the last, which is not full, and is read on the host.
        assert (stats.pages_wanted, stats.pages_hit) == (2 * 2 * 2 * 10, 2 * 2 * 2 * 9)


@DEVICES
def test_prompts_beside_rows_and_their_blocks_given_to_others(device: str) -> None:
    with model_of(device, RANKED["codes"], num_blocks=14, layers=2) as model:
        one, other = begin(model, 100, 70)
        late = model.start()
        excuses = decode(model, one, other, prompts=[(late, 60)])
        excuses += decode(model, one, other, prompts=[(late, 33)])
        excuses += decode(model, other, late, one)
        for request in (other, late):
            for layer, of_layer in zip(model.layers, request, strict=True):
                layer.finish(of_layer)
        last = model.start()
        excuses += decode(model, one, prompts=[(last, 130)])
        for _ in range(3):
            excuses += decode(model, last, one)
        check_codes(model, last, one)
        assert len(excuses) <= 3, excuses


def test_a_row_that_begins_a_block_of_another_does_not_find_what_that_had() -> None:
    """In a block of pages that lay in slots, and that no prompt has written since."""
    with model_of("emulated", RANKED["dense"], num_blocks=6) as model:
        one, other = begin(model, 96, 60)
        for _ in range(3):
            decode(model, one, other)
        of_one = list(one[0].blocks)
        model.layers[0].finish(one[0])
        for _ in range(40):
            decode(model, other)
        assert len(other[0].blocks) == 4
        assert set(other[0].blocks[2:]) <= set(of_one)


@DEVICES
def test_a_prefix_is_read_by_two_and_lies_in_one_slot(device: str) -> None:
    with model_of(device, RANKED["dense"]) as model:
        (first,) = begin(model, 130)
        second = model.start()
        for of_layer, prefix in zip(second, first, strict=True):
            of_layer.key, of_layer.value = prefix.key[:128].clone(), prefix.value[:128].clone()
            of_layer.blocks = prefix.blocks[:4]
        decode(model, first, prompts=[(second, 5)])
        for _ in range(2):
            decode(model, first, second)
        held = int((ranking_of(model).directory.state.slots >= 0).sum())
        assert held == 2 * 8


def test_blocks_that_are_copied_take_their_codes_along() -> None:
    with model_of("cuda", {"policy": "topk", "topk_pages": 2}) as model:
        layer = model.layers[0]
        (request,) = begin(model, 150)
        decode(model, request)
        decode(model, request)
        target, source = layer.free_blocks.pop(0), request[0].blocks[1]
        assert layer.on_cuda is not None
        layer.on_cuda.copy_blocks([(source, target)])
        copy = Request(request[0].key, request[0].value, [*request[0].blocks])
        copy.blocks[1] = target
        model.tier.forget_blocks([source])
        layer.kv_cache[source] = 0xFF  # of which the copy knows nothing
        decode(model, [copy])
        check_codes(model, [copy])


def test_blocks_are_written_once_the_codes_of_what_they_held_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of("cuda", {"policy": "topk", "topk_pages": 2}) as model:
        layer = model.layers[0]
        (request,) = begin(model, 150)
        decode(model, request)
        target, source = layer.free_blocks.pop(0), request[0].blocks[1]
        before, held = layer.kv_cache[target].clone(), []
        encoded = SimpleNamespace(wait=lambda: held.append(layer.kv_cache[target].clone()))
        assert layer.on_cuda is not None
        for store in layer.on_cuda._stores.values():
            monkeypatch.setattr(store, "_encoded", encoded)
        layer.on_cuda.copy_blocks([(source, target)])
        assert torch.equal(held[0], before)
        assert not torch.equal(layer.kv_cache[target], before)


@DEVICES
def test_blocks_that_others_write_are_not_found_and_get_codes(device: str) -> None:
    with model_of(device, {"policy": "topk", "topk_pages": 2}) as model:
        layer = model.layers[0]
        one, other = begin(model, 150, 150)
        for _ in range(3):
            decode(model, one, other)
        for block, source in zip(one[0].blocks[:4], other[0].blocks[:4], strict=True):
            layer.kv_cache[block] = layer.kv_cache[source]
        for written, appended in ((one[0].key, other[0].key), (one[0].value, other[0].value)):
            written[:128] = appended[:128]
        model.tier.forget_blocks(one[0].blocks[:4])
        model.tier.encode_blocks(layer.kv_cache, one[0].blocks[:4])
        decode(model, one, other)
        check_codes(model, one, other)


def frames_of(frames: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Room for so many frames of eight slots beside 64 slots of single pages."""
    slots = frames * 8 + 64
    return {**settings, "device_pool_pages": slots, "device_resident_share": (frames * 8 + 1) / slots}


def test_blocks_that_others_wrote_are_forgotten_once() -> None:
    with model_of("emulated", RANKED["dense"]) as model:
        (one,) = begin(model, 100)
        decode(model, one)
        model.tier.forget_blocks(one[0].blocks)
        for _ in range(2):
            decode(model, one)
        model.tier.take_stats()
        decode(model, one)
        stats = model.tier.take_stats()
        assert (stats.pages_wanted, stats.pages_hit) == (2 * 7, 2 * 6)  # the last page is not full


@DEVICES
def test_rows_become_resident_where_there_is_room_and_are_ranked_elsewhere(device: str) -> None:
    with model_of(device, frames_of(5, RANKED["topk-codes"]), layers=2) as model:
        one, other = begin(model, 60, 130)
        divided = [step_of_both_kinds(model, one, other) for _ in range(8)]
        assert divided[0] == [False, False]
        assert divided[-1] == [True, False]
        stats = model.tier.take_stats()
        assert stats.ranked_groups > stats.resident_groups > 0
        assert stats.blocks_entered >= 2
        for layer, of_layer in zip(model.layers, one, strict=True):
            layer.finish(of_layer)
        assert [step_of_both_kinds(model, other) for _ in range(4)][-1] == [True]
        late = begin(model, 60)
        assert step_of_both_kinds(model, *late, other) == [False, True]
        for layer, of_layer in zip(model.layers, other, strict=True):
            layer.finish(of_layer)
        for _ in range(3):
            step_of_both_kinds(model, *late)


def step_of_both_kinds(model: TieredModel, *requests: list[Request]) -> list[bool]:
    """One step; which rows were resident. These read everything, so that only steps of one kind are checked."""
    steps = model.step([(request, 1) for request in requests])
    check_slots(model)
    assert model.divided is not None
    resident: list[bool] = model.divided.resident.tolist()
    for layer, step in zip(model.layers, steps, strict=True):
        if all(resident):
            check_step(layer, replace(step, selection=SelectionSpec()))
        elif not any(resident):
            check_step(layer, step)
    return resident


@DEVICES
def test_reading_stops_where_the_threshold_is_reached(device: str) -> None:
    with model_of(device, {**RANKED["codes"], "threshold": 0.5}) as model:
        (request,) = begin(model, 400)
        assert not decode(model, request, sharpness=12.0)
        stats, read = model.tier.take_stats(), model.tier.take_decode_stats()
        assert stats.early_stops == stats.looked_groups == read.judged == 2
        assert read.pages_read < read.pages_total
        assert stats.kept_mass > 2 * 0.5


@DEVICES
def test_what_a_layer_reads_on_comes_from_its_own_slots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small microbatches and sharp rows: now and then the pages weigh less than estimated, and more are read."""
    settings = {**RANKED["codes"], "threshold": 0.7, "microbatch_pages": 1}
    with model_of(device, settings, layers=2) as model:
        kernels = ranking_of(model)._kernels
        read_on, hits = kernels.read_on, [0, 0]  # by layer: pages that were read on and found in slots
        calls = 0

        def counted(*given: Any, **named: Any) -> None:
            nonlocal calls
            tally: Tally = given[-1]
            before = int(tally.numbers[Tally.NUMBERS.index("hits")])
            read_on(*given, **named)
            hits[calls % 2] += int(tally.numbers[Tally.NUMBERS.index("hits")]) - before
            calls += 1

        monkeypatch.setattr(kernels, "read_on", counted)
        (request,) = begin(model, 200)
        excuses = [excuse for _ in range(20) for excuse in decode(model, request, sharpness=3.0)]
        assert len(excuses) <= 2, excuses
    assert calls == 2 * 20
    assert min(hits) > 0, hits


@DEVICES
@pytest.mark.parametrize("lengths", [(20, 150, 40, 130), (75, 150, 40, 60)])  # two parts of one row; rows 0, 3 and 2
def test_rows_that_would_take_too_much_memory_go_one_part_after_another(
    device: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_hybrid_sparse.runtime.ranking.ROW_PAGES_AT_ONCE", 16)
    with model_of(device, RANKED["codes"]) as model:
        requests = begin(model, *lengths)
        excuses = [excuse for _ in range(2) for excuse in decode(model, *requests)]
        assert len(excuses) <= 2, excuses


def test_rows_of_like_length_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_hybrid_sparse.runtime.ranking.ROW_PAGES_AT_ONCE", 20)
    assert rows_at_once([]) == []
    assert rows_at_once([16, 320]) == [[1], [0]]
    assert rows_at_once([160, 1]) == [[0, 1]]
    assert rows_at_once([16, 10_000, 160, 17, 150, 1]) == [[1], [2, 4], [0, 3, 5]]


class Late:
    """A mark behind a copy that is done when somebody waits for it."""

    def __init__(self) -> None:
        self.has_passed = False

    def wait(self) -> None:
        self.has_passed = True

    def passed(self) -> bool:
        return self.has_passed


def test_counts_under_way_when_all_are_discarded_are_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Late] = []

    def mark() -> Late:
        marks.append(Late())
        return marks[-1]

    monkeypatch.setattr(ranking, "current_queue", lambda _device: SimpleNamespace(mark=mark))
    tally = Tally(torch.device("cpu"))
    shown = ShownTally(tally)
    tally.numbers += 3
    assert set(shown.take().values()) == {0}  # asked for
    tally.numbers.zero_()
    shown.begin_anew()
    tally.numbers += 2
    assert set(shown.take().values()) == {0}
    marks[-1].wait()
    assert shown.take()["pages"] == 2


def test_no_thread_is_used() -> None:
    before = threading.active_count()
    with model_of("cuda", RANKED["codes"]) as model:
        requests = begin(model, 40, 150)
        decode(model, *requests)
        assert threading.active_count() == before + 1  # the loader's, which the test itself asks whether it has ended
    assert threading.active_count() == before


@torch.inference_mode()
def test_a_step_in_inference_mode() -> None:
    with model_of("cuda", RANKED["codes"]) as model:
        requests = begin(model, 17, 150)
        decode(model, *requests)


def test_the_directory_is_turned_over_behind_ranked_rows_alone() -> None:
    """Whatever the step behind them computes; without any since, nothing can have arrived."""
    with model_of("cuda", RANKED["dense"]) as model:
        directory = ranking_of(model).directory
        (one,) = begin(model, 100)
        decode(model, one)
        assert directory.step == 1
        late = model.start()
        for tokens in (20, 30):
            model.step([(late, tokens)], decode=False)
            assert directory.step == 2
        decode(model, one, late)
        assert directory.step == 2
        check_slots(model)
        decode(model, one, late)
        assert directory.step == 3
        check_slots(model)


def test_resident_rows_turn_no_directory_over() -> None:
    with model_of("cuda", frames_of(5, RANKED["topk-codes"]), layers=2) as model:
        (one,) = begin(model, 60)
        while not step_of_both_kinds(model, one)[0]:
            pass
        step_of_both_kinds(model, one)
        step = ranking_of(model).directory.step
        for _ in range(6):  # over the end of a page
            assert step_of_both_kinds(model, one) == [True]
        assert ranking_of(model).directory.step == step


def test_without_the_memory_for_codes_and_places_the_host_ranks(caplog: pytest.LogCaptureFixture) -> None:
    config = HybridSparseConfig.from_mapping({**SMALL, "device": "cuda", "microbatch_pages": 4})
    assert config.device_ranking == "device"
    with model_of("cuda", RANKED["codes"]) as model:
        layer = model.layers[0]
        stored_bytes = 40 * 2 * 2 * layer.tiered_attention.layout.page_bytes
        for device_bytes, has in ((stored_bytes // 8, False), (stored_bytes, True)):
            caplog.clear()
            with DeviceTier(
                config,
                [layer.kv_cache],
                layer.tiered_attention,
                device=torch.device("cpu"),
                device_bytes=device_bytes,
            ) as tier:
                assert (tier.ranking is not None) is has
                assert ("the host ranks pages" in caplog.text) is not has


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device_pool": "per_layer"}, "needs device_pool unified, and it is per_layer"),
        ({"device_eviction": "lru"}, "needs device_eviction cyclic, and it is lru"),
        ({"host_share": "queue"}, "needs host_share none, and it is queue"),
        ({"summary": "minmax"}, "needs summary key_codes, and it is minmax"),
        ({"remainder": "lightest_page"}, "needs remainder estimated, and it is lightest_page"),
    ],
)
def test_what_the_device_cannot_rank_is_refused_and_left_to_the_host_by_default(
    settings: dict[str, Any], why: str
) -> None:
    assert HybridSparseConfig.from_mapping({"device": "cuda", **settings}).device_ranking == "host"
    with pytest.raises(ConfigError, match=f"device_ranking='device': {why}"):
        HybridSparseConfig.from_mapping({"device": "cuda", "device_ranking": "device", **settings})


def test_the_device_ranks_by_default_where_it_can() -> None:
    for settings in ({}, {"policy": "dense"}, {"policy": "topk"}, {"policy": "dense", "summary": "minmax"}):
        assert HybridSparseConfig.from_mapping({"device": "cuda", **settings}).device_ranking == "device"
    assert HybridSparseConfig.from_mapping({"device": "emulated"}).device_ranking == "host"
    assert HybridSparseConfig.from_mapping({"device": "cuda", "policy": "hgca"}).device_ranking is None
