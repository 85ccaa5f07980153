"""How the requests of vLLM's worker become slots: in the order of the batch, and freed when the scheduler says so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadataBuilder
from vllm_hybrid_sparse.glue.worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.runtime.host import HostRuntime


def step(finished: set[str], preempted: set[str] | None = None) -> Any:
    return SimpleNamespace(finished_req_ids=finished, preempted_req_ids=preempted)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> HybridSparseCPUWorker:
    """A worker without a model, whose steps do nothing."""
    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: "done")
    made = HybridSparseCPUWorker.__new__(HybridSparseCPUWorker)
    made._runtime = HostRuntime(HybridSparseConfig(policy="hgca", num_threads=1))
    return made


def test_finished_aborted_and_preempted_requests_lose_their_slots(worker: HybridSparseCPUWorker) -> None:
    requests = worker._runtime.requests
    requests.of(["a", "b", "c"])
    assert worker.execute_model(step({"a", "not seen"})) == "done"
    assert len(requests) == 2
    worker.execute_model(step(set(), {"c"}))
    assert len(requests) == 1
    assert requests.of(["c", "b"]).tolist() == [0, 1]


def test_the_metadata_names_the_slots_of_the_batch(worker: HybridSparseCPUWorker) -> None:
    rows = ["b", "a"]
    worker._runtime.requests.follow(lambda: rows)
    builder = HybridSparseMetadataBuilder.__new__(HybridSparseMetadataBuilder)
    common: Any = SimpleNamespace(
        num_reqs=2,
        is_prefilling=torch.tensor([True, False]),
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
