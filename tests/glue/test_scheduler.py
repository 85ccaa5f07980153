"""vLLM's own schedulers admit by working set: in their order, never more than fit, and always at least one."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.glue.scheduled import BLOCK_TOKENS, KV_HEADS, LAYERS, Scheduled, request
from tests.system.tiny_models import make_tiny_model
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import scheduler as scheduler_module
from vllm_hybrid_sparse.glue.scheduler import HybridSparseAsyncScheduler, HybridSparseScheduler
from vllm_hybrid_sparse.glue.scheduler_choice import choose_scheduler
from vllm_hybrid_sparse.glue.settings import settings_on
from vllm_hybrid_sparse.glue.worker_report import WorkerReport
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.policy.admission import Admission
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec

MOST_TOKENS, MOST_REQUESTS = 512, 8
RETAINED = {"sink_tokens": 16, "window_tokens": 32}
OF_A_LONG_ONE = KV_HEADS * (1 + 2 + 1 + 2 * 8)  # working set of a long request, in pages of a layer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A configuration, made as `vllm serve` makes it from its command line."""
    arguments = EngineArgs(
        model=str(make_tiny_model("llama-gqa", tmp_path_factory.mktemp("model"))),
        dtype="float32",
        attention_backend="hybrid_sparse",
        max_model_len=MOST_TOKENS,
        max_num_batched_tokens=128,
        max_num_seqs=MOST_REQUESTS,
        enable_prefix_caching=False,
        enforce_eager=True,
        additional_config={"hybrid_sparse": {"device": "emulated"}},
    )
    return arguments.create_engine_config()


@pytest.fixture
def config(made: Any) -> Callable[..., Any]:
    """Makes a copy with other settings, with or without async scheduling, and chooses its scheduler anew."""

    def changed(*, asynchronous: bool = False, scheduler_cls: Any = None, **settings: Any) -> Any:
        copy = deepcopy(made)
        given = {"device": "emulated", "policy": "dense", **RETAINED, **settings}
        copy.additional_config = {"hybrid_sparse": given}
        copy.scheduler_config.async_scheduling = asynchronous
        copy.scheduler_config.scheduler_cls = scheduler_cls
        choose_scheduler(copy)
        return copy

    return changed


def rule(pool_pages: int) -> Admission:
    return Admission(
        retained=RetainedSet(**RETAINED),
        selection=SelectionSpec(),
        kv_heads=KV_HEADS,
        layer_pages=pool_pages // LAYERS,
    )


def test_the_engine_s_configuration_names_our_scheduler(made: Any) -> None:
    assert made.scheduler_config.get_scheduler_cls() is HybridSparseScheduler


def test_ours_is_what_vllm_would_have_taken(config: Callable[..., Any]) -> None:
    assert config().scheduler_config.get_scheduler_cls() is HybridSparseScheduler
    asynchronous = config(asynchronous=True)
    assert asynchronous.scheduler_config.get_scheduler_cls() is HybridSparseAsyncScheduler
    choose_scheduler(asynchronous)  # vLLM settles a configuration again in the engine's process
    assert asynchronous.scheduler_config.get_scheduler_cls() is HybridSparseAsyncScheduler
    assert issubclass(HybridSparseAsyncScheduler, AsyncScheduler)
    assert not issubclass(HybridSparseScheduler, AsyncScheduler)


def test_vllms_own_stays_without_a_device_and_where_admission_is_off(config: Callable[..., Any]) -> None:
    assert config(admission="none").scheduler_config.get_scheduler_cls() is Scheduler
    assert config(admission="none", asynchronous=True).scheduler_config.get_scheduler_cls() is AsyncScheduler
    assert config(device="none").scheduler_config.scheduler_cls is None


def test_a_scheduler_of_the_user_s_is_never_replaced(config: Callable[..., Any]) -> None:
    theirs = "somewhere.TheirScheduler"
    with pytest.raises(ConfigError, match=r"scheduler_cls=somewhere.TheirScheduler: .* set hybrid_sparse.admission to"):
        config(scheduler_cls=theirs)
    assert config(scheduler_cls=theirs, admission="none").scheduler_config.scheduler_cls == theirs
    assert config(scheduler_cls=theirs, device="none").scheduler_config.scheduler_cls == theirs


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("held", "at_once"), [(0.5, 1), (1, 1), (2.5, 2), (3, 3), (100, MOST_REQUESTS)])
def test_as_many_run_as_the_pool_holds_and_one_always_does(
    config: Callable[..., Any], asynchronous: bool, held: float, at_once: int
) -> None:
    pool_pages = int(held * OF_A_LONG_ONE) * LAYERS
    served = Scheduled(config(asynchronous=asynchronous, device_pool_pages=pool_pages), blocks=400)
    assert most_at_once(served) == at_once


def most_at_once(served: Scheduled) -> int:
    """How many of ten requests of 460 tokens run side by side at most; all come to their end in order."""
    names = [f"r{number}" for number in range(10)]
    for name in names:
        served.add(name, prompt_tokens=400, answer_tokens=60)
    most = 0
    for _ in range(1000):
        most = max(most, len(served.step()))
        if len(served.finished) == len(names):
            break
    assert served.begun == served.finished == names
    assert not served.preempted
    return most


@pytest.mark.parametrize("settings", [{"policy": "hgca"}, {"policy": "topk", "host_share": "all"}], ids=["hgca", "all"])
def test_if_the_host_reads_all_candidates_requests_want_the_retained_set_alone(
    config: Callable[..., Any], settings: dict[str, str]
) -> None:
    retained_pages = KV_HEADS * (1 + 2 + 1)
    served = Scheduled(config(**settings, device_pool_pages=3 * retained_pages * LAYERS), blocks=400)
    assert most_at_once(served) == 3


@pytest.mark.parametrize(("pool_pages", "share", "at_once"), [(120, 0.0, 3), (120, 0.5, 2), (118, 0.5, 1)])
def test_resident_requests_take_their_part_in_whole_blocks(
    config: Callable[..., Any], pool_pages: int, share: float, at_once: int
) -> None:
    """A request of 460 tokens is resident in 15 blocks, which take 60 pages of a layer, or wants 40 pages."""
    assert (OF_A_LONG_ONE, KV_HEADS * 15 * BLOCK_TOKENS // PAGE_TOKENS) == (40, 60)
    changed = config(device_pool_pages=pool_pages * LAYERS, device_resident_share=share)
    assert most_at_once(Scheduled(changed, blocks=400)) == at_once


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_all_end_in_a_pool_and_a_store_that_are_too_small(
    config: Callable[..., Any], asynchronous: bool, seed: int
) -> None:
    """Requests come at random and are preempted for want of blocks. Only one that runs alone may overrun the pool."""
    rng = random.Random(seed)
    pool_pages = rng.choice([OF_A_LONG_ONE * 2 + 5, OF_A_LONG_ONE * 3]) * LAYERS
    served = Scheduled(config(asynchronous=asynchronous, device_pool_pages=pool_pages), blocks=24)
    within = rule(pool_pages)
    most_tokens: dict[str, int] = {}
    together = 0
    for step in range(6000):
        if len(most_tokens) < 40 and rng.random() < 0.1:
            name, prompt, answer = f"r{step}", rng.randint(1, 400), rng.randint(1, 110)
            served.add(name, prompt, answer)
            most_tokens[name] = prompt + answer
        running = served.step()
        pages = sum(within.working_set_pages(most_tokens[name]) for name in running)
        assert pages <= within.layer_pages or len(running) == 1
        together = max(together, len(running))
        if len(most_tokens) == 40 == len(served.finished):
            break
    assert sorted(served.finished) == sorted(most_tokens)
    assert served.begun == list(most_tokens)
    assert served.preempted
    assert together > 1


def test_a_priority_queue_keeps_its_order(config: Callable[..., Any]) -> None:
    priority = config(device_pool_pages=OF_A_LONG_ONE * LAYERS)
    priority.scheduler_config.policy = "priority"
    served = Scheduled(priority, blocks=400)
    for name, of in (("a", 3), ("b", 2), ("c", 1)):
        served.add(name, prompt_tokens=400, answer_tokens=5, priority=of)
    while len(served.finished) < 3:
        assert len(served.step()) <= 1
    assert served.finished == ["c", "b", "a"]


def test_who_waits_with_blocks_is_vetted_before_who_waits_without(config: Callable[..., Any]) -> None:
    """vLLM first takes requests whose KV a connector has loaded, so their working sets must fit."""
    served = Scheduled(config(device_pool_pages=(OF_A_LONG_ONE + 4) * LAYERS), blocks=400)
    served.add("long", prompt_tokens=400, answer_tokens=50)
    served.step()
    served.add("short", prompt_tokens=10, answer_tokens=5)
    assert served.scheduler.max_num_active_reqs == MOST_REQUESTS
    served.scheduler.kv_holding_waiting.add_request(request("loaded", prompt_tokens=400, answer_tokens=50))
    assert served.scheduler.max_num_active_reqs == 1


def test_no_answer_counts_for_more_tokens_than_a_request_may_have(config: Callable[..., Any]) -> None:
    """Two requests of 512 tokens are resident in 64 pages of a layer each, whatever they ask for."""
    pool_pages = 171 * LAYERS
    served = Scheduled(config(device_pool_pages=pool_pages, device_resident_share=0.75), blocks=400)
    for name in "ab":
        served.add(name, prompt_tokens=10, answer_tokens=10_000)
    assert served.step() == ["a", "b"]


def test_an_aborted_request_makes_room(config: Callable[..., Any]) -> None:
    served = Scheduled(config(device_pool_pages=OF_A_LONG_ONE * LAYERS), blocks=400)
    served.add("a", prompt_tokens=400, answer_tokens=100)
    served.add("b", prompt_tokens=400, answer_tokens=5)
    for _ in range(6):
        assert served.step() == ["a"]
    served.abort("a")
    assert served.step() == ["b"]


def test_the_user_s_own_limit_holds(config: Callable[..., Any]) -> None:
    limited = config(device_pool_pages=OF_A_LONG_ONE * LAYERS * 4)
    limited.scheduler_config.max_num_active_seqs = 2
    served = Scheduled(limited, blocks=400)
    for name in "abcd":
        served.add(name, prompt_tokens=400, answer_tokens=20)
    for _ in range(30):
        assert len(served.step()) <= 2


def test_a_short_request_that_comes_later_does_not_overtake(config: Callable[..., Any]) -> None:
    """A request that fits waits behind one that does not, so a stream of short ones cannot starve a long one."""
    served = Scheduled(config(device_pool_pages=(OF_A_LONG_ONE + 4) * LAYERS), blocks=400)
    served.add("long", prompt_tokens=400, answer_tokens=50)
    served.step()
    served.add("next", prompt_tokens=400, answer_tokens=5)
    served.add("short", prompt_tokens=10, answer_tokens=5)
    while len(served.finished) < 3:
        served.step()
    assert served.begun == ["long", "next", "short"]


def report_of(layer_pages: int | None) -> WorkerReport:
    """What a worker reports that has decoded nothing yet."""
    return WorkerReport(
        decode=DecodeStats(),
        host_kv_bytes=0,
        packed_bytes=0,
        isa="avx512",
        threads=1,
        thread_pool="own",
        layer_pages=layer_pages,
    )


@pytest.fixture
def profiled(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scheduled]:
    """Makes a scheduler on CUDA whose settings do not say how large the pool is."""

    def scheduled(*, asynchronous: bool) -> Scheduled:
        on_cuda = settings_on({"policy": "dense", "device_resident_share": 0, **RETAINED}, on_cuda=True)
        assert on_cuda.device_pool_pages is None
        assert on_cuda.admission == "working_set"
        monkeypatch.setattr(scheduler_module, "settings_of", lambda _config: on_cuda)
        return Scheduled(config(asynchronous=asynchronous), blocks=400)

    return scheduled


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("held", "at_once"), [(0.5, 1), (1, 1), (2.5, 2), (100, MOST_REQUESTS)])
def test_a_pool_that_profiling_sized_is_not_overrun(
    profiled: Callable[..., Scheduled], asynchronous: bool, held: float, at_once: int
) -> None:
    served = profiled(asynchronous=asynchronous)
    served.report = report_of(int(held * OF_A_LONG_ONE))
    assert most_at_once(served) == at_once


@pytest.mark.parametrize("asynchronous", [False, True])
def test_until_the_pool_s_size_is_reported_vllm_alone_admits(
    profiled: Callable[..., Scheduled], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(scheduler_module.logger, "info", lambda text, *values: lines.append(text % values))
    served = profiled(asynchronous=asynchronous)
    assert len(lines) == 1
    assert "admitted by vLLM alone until the first step" in lines[0]
    names = [f"r{number}" for number in range(MOST_REQUESTS)]
    for name in names:
        served.add(name, prompt_tokens=10, answer_tokens=500)
    served.report = report_of(None)  # of a worker that has nothing to say about it
    for _ in range(5):
        assert served.step() == names
    assert len(lines) == 1
    served.report = report_of(OF_A_LONG_ONE)
    served.add("later", prompt_tokens=10, answer_tokens=5)
    for _ in range(5):
        assert served.step() == names  # those that run go on
    served.abort(names.pop())
    for _ in range(5):
        assert served.step() == names
    assert len(lines) == 2
    assert lines[1].endswith(f"{OF_A_LONG_ONE} pages of a layer for one of 512 tokens, and the device pool has 40")


def test_resident_requests_count_in_a_pool_that_profiling_sized(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to the pool's size lead to one rule."""
    given = {"policy": "dense", **RETAINED, "device_resident_share": 0.5}
    monkeypatch.setattr(scheduler_module, "settings_of", lambda _config: settings_on(given, on_cuda=True))
    told = Scheduled(config(), blocks=400)
    told.report = report_of(120)
    told.add("a", prompt_tokens=10, answer_tokens=5)
    told.step()
    given = {**given, "device_pool_pages": 120 * LAYERS}
    known = Scheduled(config(), blocks=400)
    assert told.scheduler._admission == known.scheduler._admission
    assert told.scheduler._admission.resident_pages == 60
