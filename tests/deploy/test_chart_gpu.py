"""The Helm chart with `gpu.count`: what it asks for and what it tells vLLM. Rendered only; no GPU took part."""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.deploy.chart import CLAIM, KUBERNETES, container, helm, pod, render, variables
from tests.deploy.files import refuse_unknown_options

if find_spec("helm_python") is None:
    pytest.skip("helm-python-sdk is not installed", allow_module_level=True)

ONE = {"gpu": {"count": 1}}
EIGHT = {"gpu": {"count": 8, "runtimeClassName": "nvidia"}, "cpu": {"cores": 96}, "extraArgs": ["--max-num-seqs=32"]}
MEMORY = {"kvCacheGiB": 64, "weightsGiB": 5, "packedGiB": 2, "overheadGiB": 7, "sharedGiB": 1}


@pytest.mark.parametrize("values", [ONE, EIGHT], ids=["one", "eight"])
def test_objects_are_those_of_kubernetes(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    for found in render(values).values():
        validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize(("values", "gpus"), [(ONE, 1), (EIGHT, 8)], ids=["one", "eight"])
def test_gpus_are_asked_for_and_each_has_a_worker(values: dict[str, Any], gpus: int) -> None:
    objects = render(values)
    resources = container(objects)["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == gpus
    assert container(objects)["image"] == "vllm-hybrid-sparse:cuda"
    options = refuse_unknown_options(container(objects)["args"])
    assert options.tensor_parallel_size == gpus
    assert options.attention_backend == "hybrid_sparse"
    assert pod(objects).get("runtimeClassName", "") == values["gpu"].get("runtimeClassName", "")


def test_one_gpu_needs_no_parallelism_and_no_gpu_is_not_asked_for() -> None:
    assert not [argument for argument in container(render(ONE))["args"] if "parallel" in argument]
    objects = render({"gpu": {"runtimeClassName": "nvidia"}})
    assert set(container(objects)["resources"]["limits"]) == {"cpu", "memory"}
    assert container(objects)["image"] == "vllm-hybrid-sparse:cpu"
    assert not [argument for argument in container(objects)["args"] if "parallel" in argument]
    assert "runtimeClassName" not in pod(objects)


def test_an_image_s_tag_can_be_given() -> None:
    assert container(render(ONE | {"image": {"tag": "mine"}}))["image"] == "vllm-hybrid-sparse:mine"


@pytest.mark.parametrize(("gpus", "memory", "shared"), [(0, "79Gi", "1Gi"), (1, "79Gi", "1Gi"), (8, "597Gi", "8Gi")])
def test_the_pinned_cache_and_what_lies_beside_it_count_once_for_each_worker(
    gpus: int, memory: str, shared: str
) -> None:
    """--kv-cache-memory-bytes is for each worker, and so are its packed copies, its process and its queues."""
    objects = render({"gpu": {"count": gpus}, "memory": MEMORY})
    assert container(objects)["resources"]["limits"]["memory"] == memory
    assert "--kv-cache-memory-bytes=64G" in container(objects)["args"]
    (shm,) = [volume for volume in pod(objects)["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}


def test_nothing_of_vllm_s_cpu_build_is_set() -> None:
    objects = render(EIGHT)
    assert not [name for name in variables(objects) if name.startswith("VLLM_CPU")]
    assert [name for name in variables(render({})) if name.startswith("VLLM_CPU")]
    assert container(objects)["securityContext"]["capabilities"] == {"drop": ["ALL"]}  # its workers bind no memory


def test_the_reserve_of_the_cpu_build_does_not_count() -> None:
    assert helm("refusal", {"model": CLAIM, "cpu": {"cores": 4, "reserved": 4}} | ONE) == ""


def test_users_are_told_that_it_is_not_proven() -> None:
    def notes(values: dict[str, Any]) -> str:
        (text,) = [text for name, text in helm("render", {"model": CLAIM} | values).items() if "NOTES" in name]
        return str(text)

    assert "not proven in production" in notes(ONE)
    assert "128Gi hold the KV cache" in notes(EIGHT)
    assert "GPU" not in notes({})


@pytest.mark.parametrize(
    "gpu", [{"count": -1}, {"count": 0.5}, {"count": "2"}, {"count": None}, {"counts": 1}], ids=str
)
def test_a_bad_number_of_gpus_is_refused(gpu: dict[str, Any]) -> None:
    assert "gpu" in helm("refusal", {"model": CLAIM, "gpu": gpu})
