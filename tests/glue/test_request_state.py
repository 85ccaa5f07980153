"""How the requests of vLLM's worker become slots: in the order of the batch, and freed when the scheduler says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.glue.bare_worker import bare_worker
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadataBuilder
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.predictor.model import ModelShape
from vllm_hybrid_sparse.runtime.host import HostRuntime, host_runtime


def step(finished: set[str], preempted: set[str] | None = None) -> Any:
    return SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> HybridSparseCPUWorker:
    """A worker without a model, whose steps do nothing."""
    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: "done")
    return bare_worker(_runtime=HostRuntime(HybridSparseConfig(policy="hgca", num_threads=1)))


def test_finished_aborted_and_preempted_requests_lose_their_slots(worker: HybridSparseCPUWorker) -> None:
    requests = worker._runtime.requests
    requests.of(["a", "b", "c"])
    assert worker.execute_model(step({"a", "not seen"})) == "done"
    assert len(requests) == 2
    worker.execute_model(step(set(), {"c"}))
    assert len(requests) == 1
    assert requests.of(["c", "b"]).tolist() == [0, 1]


def test_an_engine_shares_nothing_with_the_one_before_it_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its layers would be counted with the earlier ones, and its batches taken for theirs."""
    settings = HybridSparseConfig(num_threads=1)
    loaded = list[HostRuntime]()
    monkeypatch.setattr(CPUWorker, "load_model", lambda *_, **__: loaded.append(host_runtime(settings)))
    for _ in range(2):
        bare_worker().load_model()
        assert host_runtime(settings) is loaded[-1]
    assert loaded[0] is not loaded[1]


def test_every_layer_of_fluxion_is_told_of_a_request_that_ends(worker: HybridSparseCPUWorker) -> None:
    worker._runtime = runtime = HostRuntime(HybridSparseConfig(policy="fluxion", dense_tokens=0, num_threads=1))
    runtime.use_model(ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64))
    layers = [runtime.fluxion_layer(index) for index in range(2)]
    attention = runtime.attention(
        dtype=torch.float32, num_q_heads=9, num_kv_heads=3, head_dim=64, block_tokens=16, scale=0.125
    )
    slots = runtime.requests.of(["a"])
    kv_cache = torch.empty(32, 3 * attention.layout.head_block_bytes, dtype=torch.uint8)
    for tokens, done in ((400, 0), (1, 400)):
        batch = NativeBatch.from_tensors(
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([done + tokens], dtype=torch.int32),
            torch.arange(32, dtype=torch.int32)[None],
            torch.arange(done, done + tokens),
            torch.tensor([tokens == 1]),
            slots,
        )
        query, key, value = (torch.randn(tokens, heads, 64) for heads in (9, 3, 3))
        for layer in layers:
            attention.forward(
                query, key, value, kv_cache, batch, runtime.selection, None, torch.empty_like(query), fluxion=layer
            )
    assert all(layer is not None and layer.anchor(0) for layer in layers)
    worker.execute_model(step({"a"}))
    assert not any(layer is not None and layer.anchor(0) for layer in layers)


def test_the_metadata_names_the_slots_of_the_batch(worker: HybridSparseCPUWorker) -> None:
    rows = ["b", "a"]
    worker._runtime.requests.follow(lambda: rows)
    builder = HybridSparseMetadataBuilder.__new__(HybridSparseMetadataBuilder)
    common: Any = SimpleNamespace(
        num_reqs=2,
        is_prefilling=torch.tensor([True, False]),
        causal=True,
        query_start_loc_cpu=torch.tensor([0, 5, 6], dtype=torch.int32),
        seq_lens=torch.tensor([5, 9], dtype=torch.int32),
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.arange(6),
    )
    for requests, wanted in ((worker._runtime.requests, [0, 1]), (None, None)):
        builder._requests = requests
        batch = builder.build(0, common).batch
        slots = batch.tensors[5].tolist() if batch.native.has_slots else None
        assert slots == wanted
    rows.append("c")
    builder._requests = worker._runtime.requests
    with pytest.raises(KernelError, match="requests=2: the step's batch names 3"):
        builder.build(0, common)
