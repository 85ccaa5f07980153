"""vLLM's GPU worker over a host store, without a GPU: tensors in CPU memory take its place."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu_worker import Worker

from tests.glue.test_device_blocks import step
from tests.kernels.device.interpreter import interprets, mend_interpreter
from tests.tolerances import assert_close
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.glue import cuda_worker
from vllm_hybrid_sparse.glue.backend import HybridSparseBackend
from vllm_hybrid_sparse.glue.cuda_worker import HybridSparseCUDAWorker, allocated_on_host, follow
from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadataBuilder
from vllm_hybrid_sparse.glue.worker import one_of_each_storage
from vllm_hybrid_sparse.glue.worker_report import take_report
from vllm_hybrid_sparse.kernels.dense_attention.reference import attend_dense
from vllm_hybrid_sparse.kernels.fallbacks import count_fallback, take_fallbacks
from vllm_hybrid_sparse.metrics import Interval
from vllm_hybrid_sparse.runtime.block_mirror import BlockMirror
from vllm_hybrid_sparse.runtime.host import HostRuntime

GIB = 2**30
BLOCK_TOKENS, KV_HEADS, Q_HEADS, HEAD_DIM, BLOCKS = 32, 2, 4, 16, 8


def new_request(name: str, blocks: list[int]) -> Any:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=0)


def cached(requests: dict[str, list[int] | None], resumed: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    return SimpleNamespace(
        req_ids=list(requests),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in requests.values()],
        num_computed_tokens=[0] * len(requests),
        resumed_req_ids=set(resumed),
    )


class TestMirror:
    """Block tables as the scheduler reports them, for both of vLLM's runners."""

    def tables(self, mirror: BlockMirror, *names: str) -> Any:
        with mirror.step(lambda _order: names):
            tables = mirror.tables()
        return None if tables is None else [table.tolist() for table in tables]

    def test_blocks_come_with_new_requests_and_with_those_that_grow(self) -> None:
        mirror = BlockMirror()
        follow(mirror, step(scheduled_new_reqs=[new_request("a", [3, 1]), new_request("b", [5])]))
        follow(mirror, step(scheduled_cached_reqs=cached({"a": [7], "b": None})))
        assert self.tables(mirror, "b", "a") == [[5], [3, 1, 7]]

    def test_a_request_that_resumes_has_other_blocks(self) -> None:
        mirror = BlockMirror()
        follow(mirror, step(scheduled_new_reqs=[new_request("a", [3, 1]), new_request("b", [5])]))
        follow(mirror, step(preempted_req_ids={"a", "b"}))
        assert len(mirror) == 0
        follow(
            mirror, step(scheduled_cached_reqs=cached({"a": [2, 6]}, {"a"}), scheduled_new_reqs=[new_request("b", [9])])
        )
        assert self.tables(mirror, "a", "b") == [[2, 6], [9]]

    def test_nothing_is_left_of_requests_that_end(self) -> None:
        mirror = BlockMirror()
        for name in map(str, range(1000)):
            follow(mirror, step(scheduled_new_reqs=[new_request(name, [1])]))
            follow(mirror, step(finished_req_ids={name, "unknown"}))
        assert len(mirror) == 0

    def test_a_made_up_step_has_no_tables(self) -> None:
        mirror = BlockMirror()
        assert mirror.tables() is None
        with pytest.raises(ZeroDivisionError), mirror.step(lambda _order: [1 // 0]):  # type: ignore[list-item]
            mirror.tables()
        assert mirror.tables() is None


@pytest.mark.parametrize("v2", [True, False])
def test_caches_are_allocated_on_the_host_by_vllm_s_own_function(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = attn_utils if v2 else gpu_model_runner
    asked: list[Any] = []
    monkeypatch.setattr(module, "allocate_kv_cache", lambda *given, **named: asked.append((given, named)))
    ours = module.allocate_kv_cache

    def initialize(*, fails: bool) -> None:
        with allocated_on_host(v2=v2):
            module.allocate_kv_cache("config", torch.device("cuda", 1), "layout", kernel_block_sizes=[16])
            if fails:
                raise MemoryError

    with pytest.raises(MemoryError):
        initialize(fails=True)
    assert asked == [(("config", torch.device("cpu"), "layout"), {"kernel_block_sizes": [16]})]
    assert module.allocate_kv_cache is ours


def test_memory_that_layers_share_is_pinned_once() -> None:
    store, other = torch.zeros(100), torch.zeros(3)
    assert [tensor.numel() for tensor in one_of_each_storage([store[:50], store[50:], other])] == [50, 3]


def bare_worker(runtime: HostRuntime | None = None) -> Any:
    made: Any = HybridSparseCUDAWorker.__new__(HybridSparseCUDAWorker)
    made._runtime = runtime
    return made


@pytest.mark.parametrize("pages", [None, 64])
@pytest.mark.parametrize("asked", [None, 3 * GIB])
def test_vllm_counts_blocks_by_host_memory_and_the_pool_gets_what_profiling_leaves(
    asked: int | None, pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the settings fix the pool's pages, nothing is profiled: vLLM is told a size, and then it does not profile."""
    seen: list[int | None] = []

    def profile(self: Any) -> int:
        seen.append(self.cache_config.kv_cache_memory_bytes)
        return 20 * GIB

    runtime = HostRuntime(HybridSparseConfig(device="cuda", device_pool_pages=pages, num_threads=1))
    monkeypatch.setattr(Worker, "determine_available_memory", profile)
    monkeypatch.setattr(cuda_worker, "available_bytes", lambda: 40 * GIB)
    monkeypatch.setattr(cuda_worker, "settings_of", lambda _config: runtime.settings)
    impl = SimpleNamespace(num_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, stored_dtype=torch.float32)
    worker = bare_worker()
    worker._layers = lambda: [SimpleNamespace(impl=impl)]
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=asked)
    worker.parallel_config = SimpleNamespace(local_world_size=1, data_parallel_size_local=2, numa_bind=False)
    worker.local_rank = 0
    worker.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=1000))
    monkeypatch.setattr(cuda_worker, "host_runtime", lambda _settings: runtime)
    monkeypatch.setattr(cuda_worker, "set_current_vllm_config", lambda _config: torch.no_grad())
    store = asked or 10 * GIB
    assert worker.determine_available_memory() == store
    assert seen == [None if pages is None else store]
    assert worker.cache_config.kv_cache_memory_bytes == asked
    working = 4 * KV_HEADS * 128 * 16 * HEAD_DIM * 4 + 8 * 1000 * Q_HEADS * (HEAD_DIM + 1) * 4
    ranking = 2 * (2**18 * 9 // 8) * (4 * Q_HEADS + 65 * KV_HEADS)
    assert worker._pool_bytes == (0 if pages else 20 * GIB - working - ranking)


def kernel_of(runtime: HostRuntime) -> Any:
    return runtime.attention(
        dtype=torch.float32,
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
        scale=0.25,
    )


class Served:
    """A worker whose "model" is one layer. It gets what vLLM would hand to it, as each of the runners does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, v2: bool) -> None:
        settings = HybridSparseConfig(
            device="cuda", policy="dense", device_pool_pages=64, sink_tokens=16, window_tokens=32, num_threads=1
        )
        self.runtime = HostRuntime(settings)
        kernel = kernel_of(self.runtime)
        self.kv_cache = torch.full((BLOCKS, KV_HEADS * kernel.layout.head_block_bytes), 0xFF, dtype=torch.uint8)
        self.runtime.open_device([self.kv_cache], [kernel], device=torch.device("cpu"))
        self.builder: Any = HybridSparseMetadataBuilder.__new__(HybridSparseMetadataBuilder)
        self.builder._blocks, self.builder._block_tokens = self.runtime.blocks, BLOCK_TOKENS
        self.builder._runtime = self.runtime
        self.worker = bare_worker(self.runtime)
        self.worker._connected, self.worker.use_v2_model_runner = False, v2
        self.worker.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK_TOKENS))
        self.worker.model_runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=[]), req_states=SimpleNamespace(index_to_req_id={5: "a", 2: "b"})
        )
        self.contents: dict[str, torch.Tensor] = {}
        self.rows: list[tuple[str, int, bool]] = []
        self.output = torch.empty(0)
        monkeypatch.setattr(Worker, "execute_model", lambda _worker, _output: self.forward())

    def forward(self) -> str:
        """Run one layer over the step's rows and some padding behind them."""
        lengths, starts, parts = [], [0], []
        for name, tokens, _ in self.rows:
            new = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
            self.contents[name] = torch.cat((self.contents.get(name, new[:0]), new))
            lengths.append(len(self.contents[name]))
            starts.append(starts[-1] + tokens)
            parts.append(new)
        index = {"a": 5, "b": 2}
        meta = SimpleNamespace(
            req_idx=[index[name] for name, _, _ in self.rows],
            num_reqs=len(self.rows) + 1,
            query_start_loc_cpu=torch.tensor([*starts, starts[-1]], dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.tensor([*lengths, 0], dtype=torch.int32),
            is_prefilling=torch.tensor([prefilling for _, _, prefilling in self.rows]),
            causal=True,
        )
        metadata = self.builder.build(0, meta)
        padded = torch.cat((*parts, torch.full((3, Q_HEADS + 2 * KV_HEADS, HEAD_DIM), torch.nan)))
        query, key, value = padded.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.output = torch.full_like(query, torch.nan)
        assert self.runtime.cuda_layers is not None
        self.runtime.cuda_layers.forward(query, key, value, self.kv_cache, metadata.batch, self.output)
        return "done"

    def step(self, rows: list[tuple[str, int, bool]], **scheduled: Any) -> None:
        """Run a step of `(request, tokens, whether its prompt is computed)` and check every row."""
        self.rows = rows
        self.worker.model_runner.input_batch.req_ids = [name for name, _, _ in rows]
        assert self.worker.execute_model(step(**scheduled)) == "done"
        first = 0
        for name, tokens, _ in rows:
            query, key, value = (
                part.transpose(0, 1) for part in self.contents[name].split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            )
            wanted, _ = attend_dense(query, key, value, scale=0.25, causal=True)
            assert_close(self.output[first : first + tokens], wanted[:, -tokens:].transpose(0, 1), torch.float32)
            first += tokens
        assert self.output[first:].isnan().all()


@pytest.fixture(params=[True, False], ids=["runner_v2", "runner_v1"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    if not interprets():
        pytest.skip("the kernels are compiled in this run")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter reads it again at its first launch
    mend_interpreter()
    torch.manual_seed(0)
    made = Served(monkeypatch, v2=request.param)
    yield made
    made.runtime.close()


def test_requests_are_served_from_what_the_scheduler_and_the_runner_say(served: Served) -> None:
    served.step([("a", 40, True)], scheduled_new_reqs=[new_request("a", [6, 1])])
    served.step([("b", 33, True), ("a", 20, True)], scheduled_new_reqs=[new_request("b", [3, 0])])
    served.step([("a", 1, False), ("b", 1, False)], scheduled_cached_reqs=cached({"a": None, "b": None}))
    for grown in ([4], None, None, None, None):
        served.step([("b", 1, False), ("a", 1, False)], scheduled_cached_reqs=cached({"b": None, "a": grown}))
    tiers = served.runtime.take_tier_stats()
    assert tiers is not None
    assert (tiers.groups, tiers.resident_groups) == (12 * KV_HEADS, 10 * KV_HEADS)


def warm_up_as_vllm(worker: Worker) -> str:
    """Stands for vLLM's warm-up, which ends by beginning to watch for compilations."""
    worker._maybe_activate_jit_monitor()
    return "times"


def test_vllms_warm_up_ends_by_watching_for_compilations() -> None:
    assert "_maybe_activate_jit_monitor" in inspect.unwrap(Worker.compile_or_warm_up_model).__code__.co_names


def test_kernels_are_compiled_before_vllm_watches_for_compilations(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up_as_vllm)
    monkeypatch.setattr(Worker, "_maybe_activate_jit_monitor", lambda _worker: done.append("vLLM watches"))
    monkeypatch.setattr(served.runtime.cuda_layers, "warm_up", lambda: done.append("our kernels"))
    assert served.worker.compile_or_warm_up_model() == "times"
    assert done == ["our kernels", "vLLM watches"]


@pytest.mark.filterwarnings("ignore:All-NaN")  # of what the store holds before anything is stored
def test_long_contexts_are_warmed_up_behind_vllms_own(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up_as_vllm)
    monkeypatch.setattr(Worker, "_maybe_activate_jit_monitor", lambda _worker: None)
    assert served.worker.compile_or_warm_up_model() == "times"
    test_requests_are_served_from_what_the_scheduler_and_the_runner_say(served)


class TritonError(Exception):
    """Stands for Triton's own error."""


def test_a_warm_up_that_fails_is_left_to_the_first_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's errors have a class of their own."""
    said: list[str] = []

    def fail() -> None:
        raise TritonError("PTXAS error")

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up_as_vllm)
    monkeypatch.setattr(Worker, "_maybe_activate_jit_monitor", lambda _worker: None)
    monkeypatch.setattr(served.runtime.cuda_layers, "warm_up", fail)
    monkeypatch.setattr(cuda_worker.logger, "warning", lambda text, *args: said.append(text % args))
    take_fallbacks()
    assert served.worker.compile_or_warm_up_model() == "times"
    assert take_fallbacks() == {"warm_up": 1}
    assert said == ["hybrid_sparse: kernels are compiled when they are first needed (PTXAS error)"]


def test_nothing_is_reported_on_the_outputs_of_vllm_s_own_warm_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runner V2 warms up with steps of the worker's, whose outputs nobody reads: what is reported there is lost."""
    own = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    monkeypatch.setattr(Worker, "sample_tokens", lambda *_: own)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda worker: worker.sample_tokens(None))
    worker = served.worker
    worker._interval, worker._logs, worker._reports, worker._host_kv_bytes = Interval(0.0), False, True, 5
    served.runtime._layers = 1
    served.step([("a", 40, True)], scheduled_new_reqs=[new_request("a", [6, 1])])
    served.step([("a", 1, False)], scheduled_cached_reqs=cached({"a": None}))
    take_fallbacks()
    count_fallback("device_graphs")
    assert worker.compile_or_warm_up_model().ec_connector_output is None
    assert take_fallbacks() == {"device_graphs": 1}
    assert worker._reports


@pytest.mark.parametrize("profiled", [True, False])
def test_a_pool_s_size_is_told_where_profiling_found_it(
    served: Served, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the worker that has the least: vLLM reads the output of one worker, and all agree once their pools exist."""
    tier = served.runtime.device_tier
    assert tier is not None
    assert tier.layer_pages == 64
    asked: list[Any] = []

    def of_others(pages: int, groups: Any) -> int:
        asked.append((pages, *groups))
        return pages - 1

    if profiled:
        tier.settings = replace(tier.settings, device_pool_pages=None)
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda _worker: "times")
    monkeypatch.setattr(cuda_worker, "least_of", of_others)
    for name in ("tp", "pp"):
        monkeypatch.setattr(cuda_worker, f"get_{name}_group", lambda name=name: SimpleNamespace(cpu_group=name))
    served.worker.compile_or_warm_up_model()
    assert asked == ([(64, "tp", "pp")] if profiled else [])
    assert served.worker._layer_pages == (63 if profiled else None)


def test_a_request_that_comes_again_is_not_read_where_it_was(served: Served) -> None:
    """One of its blocks was another's meanwhile; the other holds a prefix that nobody has written since."""
    served.step([("a", 40, True)], scheduled_new_reqs=[new_request("a", [6, 1])])
    for _ in range(2):
        served.step([("a", 1, False)], scheduled_cached_reqs=cached({"a": None}))
    served.step([("b", 40, True)], scheduled_new_reqs=[new_request("b", [1, 3])], finished_req_ids={"a"})
    served.contents["a"] = served.contents.pop("a")[:32]
    served.step([("b", 1, False)], scheduled_cached_reqs=cached({"b": None}))
    served.step(
        [("a", 9, True), ("b", 1, False)],
        scheduled_new_reqs=[new_request("a", [6, 7])],
        scheduled_cached_reqs=cached({"b": None}),
    )
    for _ in range(3):
        served.step([("b", 1, False), ("a", 1, False)], scheduled_cached_reqs=cached({"b": None, "a": None}))
    tiers = served.runtime.take_tier_stats()
    assert tiers is not None
    assert tiers.resident_groups == (1 + 1 + 3 + 2) * KV_HEADS


def test_copied_blocks_are_read_by_the_step_that_copies_them(served: Served) -> None:
    served.step([("a", 40, True)], scheduled_new_reqs=[new_request("a", [6, 1])])
    served.contents["b"] = served.contents["a"][:36].clone()
    copies = [KVCacheBlockCopy(src_block_id=1, dst_block_id=4)]
    served.step([("b", 1, True)], scheduled_new_reqs=[new_request("b", [6, 4])], kv_cache_block_copies=copies)
    served.step([("b", 1, False)], scheduled_cached_reqs=cached({"b": None}))


@pytest.mark.parametrize("promised", [True, False])
def test_the_figures_ride_on_the_output_of_either_runner(
    served: Served, promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Promise(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return EMPTY_MODEL_RUNNER_OUTPUT

    ending = Promise() if promised else EMPTY_MODEL_RUNNER_OUTPUT
    monkeypatch.setattr(Worker, "sample_tokens", lambda *_: ending)
    worker = served.worker
    worker._interval, worker._logs, worker._reports, worker._host_kv_bytes = Interval(0.0), False, True, 5
    served.runtime._layers = 1
    assert worker.sample_tokens(None) is ending  # nothing was decoded
    served.step([("a", 40, True)], scheduled_new_reqs=[new_request("a", [6, 1])])
    served.step([("a", 1, False)], scheduled_cached_reqs=cached({"a": None}))
    output = worker.sample_tokens(None)
    assert isinstance(output, AsyncModelRunnerOutput) is promised  # a promise that nobody has waited for
    carried = (output.get_output() if promised else output).ec_connector_output.ec_connector_stats
    report = take_report(SchedulerStats(ec_connector_stats=carried.data))
    assert report is not None
    assert (report.decode.rows, report.decode.selections) == (1, KV_HEADS)


def test_a_made_up_step_has_no_batch(served: Served) -> None:
    meta = SimpleNamespace(req_idx=None, num_reqs=3, causal=True)
    assert served.builder.build(0, meta).batch is None


@pytest.mark.parametrize(("major", "serves"), [(7, False), (8, True), (9, True)])
def test_the_backend_says_which_gpus_it_serves(major: int, serves: bool) -> None:
    assert HybridSparseBackend.supports_compute_capability(SimpleNamespace(major=major, minor=0)) is serves
