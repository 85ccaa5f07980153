"""Launches captured on a GPU and replayed: they read what later steps upload, and other threads go on."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.memory.step_tensors import StepTensors
from vllm_hybrid_sparse.runtime.launch_graphs import CudaCapture, LaunchGraphs

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def test_a_replay_reads_what_was_uploaded_last(gpu: torch.device) -> None:
    tensors, graphs = StepTensors(gpu), LaunchGraphs(CudaCapture(gpu))
    output, launched = torch.zeros(4, dtype=torch.int32, device=gpu), []
    for step in range(6):
        place, parts = tensors.upload("rows", {"numbers": np.full(4, step, dtype=np.int32)})

        def launch(numbers: torch.Tensor = parts["numbers"], step: int = step) -> None:
            launched.append(step)
            output.copy_(numbers.sort(descending=True).values * 2)

        graphs.run(place, launch)
        assert output.tolist() == [2 * step] * 4
    assert launched == [0, 1], "what comes a second time is captured"


def test_other_threads_compute_while_launches_are_captured(gpu: torch.device) -> None:
    graphs = LaunchGraphs(CudaCapture(gpu))
    output = torch.zeros(8, device=gpu)

    def beside() -> float:
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            made = torch.ones(1 << 20, device=gpu)
            torch.cuda.current_stream().synchronize()
            return float(made.sum())

    with ThreadPoolExecutor(max_workers=1) as thread:

        def launch() -> None:
            assert thread.submit(beside).result() == 1 << 20
            output.add_(torch.ones(8, device=gpu))

        for _ in range(3):
            graphs.run("key", launch)
    assert output.tolist() == [3.0] * 8
