"""Launches before the first request, of which nothing stays."""

from typing import Any

import pytest
import torch

from tests.kernels.served_layer import Shape
from tests.kernels.step_checks import check_step
from tests.runtime.test_step import POLICIES, SMALL
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.kernels.merge.gpu import merge_states
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.runtime import cuda, prefill
from vllm_hybrid_sparse.runtime import warm_up as warm_up_module
from vllm_hybrid_sparse.runtime.step_rows import RankedRows

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:All-NaN"),  # what lies in the store before anything was stored
]

TINY = Shape(head_dim=16, block_tokens=32)


def model_of(policy: str, *, ranking: str = "device", resident: float = 0.5, num_blocks: int = 40) -> TieredModel:
    settings = {**SMALL, **POLICIES[policy], "device": "cuda", "device_ranking": ranking}
    settings |= {"device_pool_pages": 128, "device_resident_share": resident}
    return TieredModel(settings, shape=TINY, layers=2, num_blocks=num_blocks)


@pytest.mark.parametrize("policy", ["dense", "codes"])
def test_what_follows_is_as_without_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up_module, "_CANDIDATES", 8)
    with model_of(policy, resident=0.5 if policy == "dense" else 0.0) as model:
        ranking, on_cuda = model.tier.ranking, model.layers[0].on_cuda
        assert ranking is not None
        assert on_cuda is not None
        attended: list[RankedRows] = []
        attend = ranking.attend

        def spy(layer: int, query: Any, rows: RankedRows, *rest: Any) -> None:
            attended.append(rows)
            attend(layer, query, rows, *rest)

        monkeypatch.setattr(ranking, "attend", spy)
        before = [layer.kv_cache.clone() for layer in model.layers]
        on_cuda.warm_up()
        assert [rows.most_candidates > 0 for rows in attended] == [policy != "dense"]
        assert all(torch.equal(layer.kv_cache, was) for layer, was in zip(model.layers, before, strict=True))
        stats = model.tier.take_stats()
        assert stats.pages_wanted == stats.ranked_groups == stats.looked_groups == stats.kept_mass == 0
        model.settle()
        requests = [model.start() for _ in range(2)]
        for request, length in zip(requests, (60, 150), strict=True):
            model.step([(request, length)], decode=False)
        for _ in range(3):
            steps = model.step([(request, 1) for request in requests], sharpness=3.0)
            excuses = [check_step(layer, step) for layer, step in zip(model.layers, steps, strict=True)]
            assert excuses == [[], []]


def test_no_number_is_negative_behind_rows_that_vllm_has_warmed_up_with() -> None:
    """Whose numbers were taken already."""
    with model_of("codes", resident=0.0) as model:
        tokens = 16 * 24
        warm = model.start()
        model.step([(warm, tokens)], decode=False)
        for _ in range(2):
            model.step([(warm, 1)])
        assert model.tier.take_stats().pages_wanted > 0
        assert model.tier.take_decode_stats().pages_read > 0
        for layer, of_layer in zip(model.layers, warm, strict=True):
            layer.finish(of_layer)
        assert model.layers[0].on_cuda is not None
        model.layers[0].on_cuda.warm_up()
        model.settle()
        request = model.start()
        model.step([(request, 20)], decode=False)
        model.step([(request, 1)])
        stats, read = model.tier.take_stats(), model.tier.take_decode_stats()
        assert stats.pages_wanted == read.pages_read == 2 * 2 * 2  # layers, KV heads, pages


def launches(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a module's function is called with from now on: what kernels are compiled for, of each argument."""
    seen: list[Any] = []
    call = getattr(module, name)

    def spy(*args: Any, **named: Any) -> Any:
        every = [*args, *(named[key] for key in sorted(named))]
        seen.append([compiled_for(arg) for arg in every])
        return call(*args, **named)

    monkeypatch.setattr(module, name, spy)
    return seen


def compiled_for(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    if isinstance(argument, Progress):
        return argument.done.shape[1], argument.lightest.shape[1]
    return type(argument)


@pytest.mark.parametrize(
    ("policy", "ranking"), [("codes", "host"), ("codes-lightest", "host"), ("psa", "host"), ("codes", "device")]
)
def test_what_looks_at_two_tier_rows_has_been_launched(
    policy: str, ranking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with model_of(policy, ranking=ranking, resident=0.0) as model:
        before = launches(warm_up_module, "verify", monkeypatch)
        later = launches(cuda, "verify", monkeypatch)
        assert model.layers[0].on_cuda is not None
        model.layers[0].on_cuda.warm_up()
        model.settle()
        request = model.start()
        model.step([(request, 150)], decode=False)
        model.step([(request, 1)])
        if ranking == "device":
            assert before == later == []
        else:
            assert [before[0]] * len(later) == later != []


def test_what_merges_a_prompt_s_chunks_has_been_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def merge(*states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(part.is_contiguous() for part in states)
        seen.append([(part.dtype, part.shape[2:]) for part in states])
        return merge_states(*states)

    monkeypatch.setattr(warm_up_module, "choose_merge", lambda *_: ("triton", merge))
    monkeypatch.setattr(prefill, "choose_merge", lambda *_: ("triton", merge))
    with model_of("codes") as model:
        assert model.layers[0].on_cuda is not None
        model.layers[0].on_cuda.warm_up()
        assert len(seen) == 1
        model.settle()
        request = model.start()
        model.step([(request, 40)], decode=False)
        model.step([(request, 40)], decode=False)
        assert len(seen) == 1 + len(model.layers)
        assert all(launch == seen[0] for launch in seen)


@pytest.mark.parametrize(("ranking", "resident"), [("host", 0.5), ("host", 0.0), ("device", 0.0)])
def test_only_what_there_is_is_launched(ranking: str, resident: float) -> None:
    with model_of("codes", ranking=ranking, resident=resident, num_blocks=3) as model:
        assert model.layers[0].on_cuda is not None
        model.layers[0].on_cuda.warm_up()
        model.settle()
