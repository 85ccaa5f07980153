"""Which cores threads of the CPU kernel get, and how many threads there are by default."""

import os

import pytest
import torch

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.runtime import cores
from vllm_hybrid_sparse.runtime.cores import default_threads, helper_cpus
from vllm_hybrid_sparse.runtime.host import HostRuntime

NAMES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def allow(cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parent process run on these cores, and this process on the lowest of them."""
    monkeypatch.setattr(cores.os, "sched_getaffinity", {os.getppid(): cpus, 0: {min(cpus)}}.__getitem__)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("GOMP_CPU_AFFINITY", "4 5 6 7"), ("KMP_AFFINITY", "granularity=fine,explicit,proclist=[4,5,6,7]")],
)
def test_helpers_get_the_cores_that_vllm_bound_openmp_to_and_then_others(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM sets them for GNU's and for Intel's OpenMP; the first core is the calling thread's."""
    allow({3, 4, 5, 6, 7, 8}, monkeypatch)
    assert helper_cpus(3) == []
    monkeypatch.setenv(variable, value)
    assert helper_cpus(3) == [5, 6]
    assert helper_cpus(6) == [5, 6, 7, 3, 8]
    assert helper_cpus(1) == []
    monkeypatch.setenv(variable, "granularity=fine,compact" if variable == "KMP_AFFINITY" else "0-3")
    assert helper_cpus(3) == []


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does by default on a core with two hardware threads."""
    allow({0, 1}, monkeypatch)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("one_of_two")
def test_a_core_that_vllm_leaves_idle_is_used() -> None:
    assert default_threads("none") == default_threads("emulated") == 2
    runtime = HostRuntime(HybridSparseConfig())
    assert (runtime.pool.size, runtime.helpers) == (2, "own")
    assert helper_cpus(2) == [1]


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_CPU_OMP_THREADS_BIND", "0"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_CPU_NUM_OF_RESERVED_CPU", "1"),
        ("GOMP_CPU_AFFINITY", ""),
    ],
)
def test_what_the_user_says_of_cores_is_kept_to(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert default_threads("none") == 1
    assert HostRuntime(HybridSparseConfig()).pool.size == 1


@pytest.mark.usefixtures("one_of_two")
def test_a_core_that_may_be_another_worker_s_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_threads("none", local_workers=2) == 1
    allow({0, 1, 2}, monkeypatch)
    assert default_threads("none") == 1


@pytest.mark.parametrize(
    ("gpus_on_cores", "cores_of_machine", "threads"), [(None, 64, 3), (4, 64, 7), (8, 64, 3), (4, 32, 3)]
)
def test_a_gpu_s_worker_takes_its_part_of_the_cores_that_it_is_bound_to(
    gpus_on_cores: int | None, cores_of_machine: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 cores, with eight GPUs in the machine. If 32 are all there are, the system did not let vLLM bind it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _pid: set(range(32)))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: cores_of_machine)
    assert default_threads("cuda", gpus_on_cores=gpus_on_cores) == threads
    assert default_threads("cuda", local_workers=8, gpus_on_cores=gpus_on_cores) == threads


@pytest.mark.usefixtures("one_of_two")
def test_openmp_s_threads_are_not_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A team of several threads waits on its cores, and a helper would need one of them."""
    allow({0, 1, 2}, monkeypatch)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0 1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert default_threads("none") == 2
    assert helper_cpus(2) == [1]


def test_a_number_that_is_given_is_taken_with_threads_of_its_own_beyond_the_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    runtime = HostRuntime(HybridSparseConfig(num_threads=3))
    assert (runtime.pool.size, runtime.helpers) == (3, "own")


def test_more_threads_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allow({4, 5, 6}, monkeypatch)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "4 5")
    HostRuntime(HybridSparseConfig(num_threads=3, thread_pool="own"))
    assert caplog.text == ""
    HostRuntime(HybridSparseConfig(num_threads=4, thread_pool="own"))
    assert "hybrid_sparse.num_threads=4: more than the 3 cores there are" in caplog.text
