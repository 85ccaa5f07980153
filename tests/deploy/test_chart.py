"""The Helm chart: linted and rendered by Helm's own library, every object checked by Kubernetes's schemas."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import CLAIM, KUBERNETES, container, helm, pod, render, variables
from tests.deploy.files import CHART, ROOT, load_yaml, refuse_unknown_options
from vllm_hybrid_sparse.config import HybridSparseConfig

if find_spec("helm_python") is None:
    pytest.skip("helm-python-sdk is not installed", allow_module_level=True)

EVERYTHING = {
    "replicas": 3,
    "model": {"path": "/model", "claim": "models", "servedName": "llama 8b"},
    "settings": {"policy": "topk", "topk_ratio": 0.1},
    "extraArgs": ["--max-model-len=131072"],
    "extraEnv": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    "imagePullSecrets": [{"name": "registry"}],
    "cpu": {"cores": 8, "threadsBind": "0-6"},
    "maxQueuedRequests": 0,
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "cache": {"claim": "compiled"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "podAnnotations": {"team": "a"},
}


def test_helm_has_no_objection() -> None:
    found = helm("lint", {})
    assert found["errors"] == []
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_objects_are_those_of_kubernetes(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    objects = render(values)
    for kind, found in objects.items():
        if kind != "ServiceMonitor":  # the Prometheus operator defines this kind
            validate(found, KUBERNETES, strict=True)
    assert {"Deployment", "Service"} <= set(objects)


def test_a_schema_error_would_be_seen() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    deployment = render({})["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(deployment, KUBERNETES, strict=True)


def test_a_pod_is_replaced_without_a_second_one_beside_it() -> None:
    assert render({})["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    recreate = {"type": "Recreate"}  # `--set strategy.type=Recreate`; the chart's rollingUpdate stays beside it
    for strategy in (recreate, recreate | {"rollingUpdate": None}):
        assert render({"strategy": strategy})["Deployment"]["spec"]["strategy"] == recreate


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), ("25%", 0), (0, "10%")])
def test_how_a_pod_is_replaced_can_be_chosen(surge: int | str, unavailable: int | str) -> None:
    chosen = {"maxSurge": surge, "maxUnavailable": unavailable}
    strategy = render({"strategy": {"rollingUpdate": chosen}})["Deployment"]["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": chosen}


def test_memory_is_the_sum_of_its_parts_and_the_pod_is_guaranteed() -> None:
    memory = {"kvCacheGiB": 200, "weightsGiB": 15, "packedGiB": 20, "overheadGiB": 8, "sharedGiB": 2}
    objects = render({"memory": memory, "cpu": {"cores": 24}})
    resources = container(objects)["resources"]
    assert resources["limits"] == resources["requests"] == {"cpu": 24, "memory": "245Gi"}
    assert "--kv-cache-memory-bytes=200G" in container(objects)["args"]
    (shm,) = [volume for volume in pod(objects)["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_vllm_knows_the_arguments_and_the_backend_the_settings(values: dict[str, Any]) -> None:
    options = refuse_unknown_options(container(render(values))["args"])
    merged = helm("merge", values)
    assert options.additional_config == {"hybrid_sparse": merged["settings"]}
    HybridSparseConfig.from_mapping(options.additional_config["hybrid_sparse"])
    assert options.kv_cache_memory_bytes == merged["memory"]["kvCacheGiB"] * 2**30
    assert options.max_num_queued_reqs == (merged["maxQueuedRequests"] or None)
    assert options.served_model_name == [merged["model"]["servedName"]]


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({}, -1),  # auto, as vLLM parses it
        ({"maxModelLen": 1_048_576}, 1_048_576),
        ({"maxModelLen": 4096, "extraArgs": ["--max-model-len=131072"]}, 131_072),
    ],
    ids=json.dumps,
)
def test_the_context_fits_the_cache_unless_a_length_is_given(values: dict[str, Any], length: int) -> None:
    assert refuse_unknown_options(container(render(values))["args"]).max_model_len == length


def test_a_pod_has_time_to_be_forgotten_to_answer_and_to_end() -> None:
    objects = render({"drain": {"endpointSeconds": 7, "answerSeconds": 300}})
    assert container(objects)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert "--shutdown-timeout=300" in container(objects)["args"]
    assert pod(objects)["terminationGracePeriodSeconds"] >= 7 + 300 + 30


def test_disruption_is_limited_where_there_is_a_second_replica() -> None:
    assert "PodDisruptionBudget" not in render({})
    budget = render({"replicas": 2})["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    deployment = render({"replicas": 2})["Deployment"]["spec"]
    assert budget["selector"] == deployment["selector"]
    assert deployment["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


def test_prometheus_is_told_only_where_asked() -> None:
    assert "ServiceMonitor" not in render({})
    objects = render(EVERYTHING)
    monitor = objects["ServiceMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= objects["Service"]["metadata"]["labels"].items()
    assert "vllm" in objects["Service"]["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert monitor["spec"]["endpoints"][0]["port"] == objects["Service"]["spec"]["ports"][0]["name"]


def test_cores_are_reserved_only_where_vllm_chooses_them() -> None:
    assert variables(render({}))["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    named = variables(render(EVERYTHING))
    assert named["VLLM_CPU_OMP_THREADS_BIND"] == "0-6"
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in named


def test_a_pod_without_bound_memory_keeps_to_the_restricted_pod_security_level() -> None:
    assert container(render({}))["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    objects = render({"cpu": {"bindMemory": False}})
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod(objects)["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
    assert pod(objects)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all({"emptyDir", "persistentVolumeClaim"} & set(volume) for volume in pod(objects)["volumes"])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod(objects))
    assert all("hostPort" not in port for port in container(objects)["ports"])


@pytest.mark.parametrize(("startup_s", "period_s"), [(1800, 10), (60, 61), (100, 30), (60, 3600)])
def test_a_start_has_its_time_whatever_the_period(startup_s: int, period_s: int) -> None:
    probe = container(render({"probes": {"startupSeconds": startup_s, "periodSeconds": period_s}}))["startupProbe"]
    assert probe["periodSeconds"] == period_s
    last_probe_s = (probe["failureThreshold"] - 1) * period_s  # the first one comes at once
    assert startup_s <= last_probe_s < startup_s + period_s


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("chat", "chat"),
        ("8b-model", "vllm-8b-model"),
        ("8", "vllm-8"),
        ("null", "null"),
        ("chat.v2", "chat-v2"),
        ("long-" * 10 + "con", "long-" * 9 + "long"),
        ("8" * 53, "vllm-" + "8" * 45),
    ],
)
def test_a_service_has_a_legal_name_whatever_the_release(release: str, name: str) -> None:
    objects = render({}, release)
    assert {found["metadata"]["name"] for found in objects.values()} == {name}
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)  # a label of RFC 1035
    assert objects["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] == release


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "model.path=/model: a folder of the volume model.claim"),
        ({"model": {"path": "/model/llama"}}, "model.path=/model/llama: "),
        ({"strategy": {"rollingUpdate": {"maxUnavailable": 0}}}, "rollingUpdate.maxUnavailable=0: must be above 0"),
        ({"strategy": {"rollingUpdate": {"maxUnavailable": "0%"}}}, "rollingUpdate.maxUnavailable=0%: must be above 0"),
        ({"cpu": {"cores": 4, "reserved": 4}}, "cpu.reserved=4: must be below cpu.cores=4"),
    ],
    ids=json.dumps,
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    assert said in helm("refusal", values if said.startswith("model.") else {"model": CLAIM} | values)
    assert helm("lint", values)["errors"] == []  # lint checks a chart, whose values are not complete yet


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"path": "meta-llama/Llama-3.2-1B"}},
        {"model": {"path": "/models/of-an-image"}},
        {"model": CLAIM | {"path": "/model/llama"}},
        {"model": CLAIM, "cpu": {"cores": 4, "reserved": 4, "threadsBind": "0-3"}},
        {"model": CLAIM, "strategy": {"type": "Recreate", "rollingUpdate": {"maxUnavailable": 0}}},
    ],
    ids=json.dumps,
)
def test_values_that_go_together_are_not(values: dict[str, Any]) -> None:
    assert helm("refusal", values) == ""


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 0},
        {"memory": {"kvCacheGiB": 0}},
        {"memory": {"kvCacheGiB": "16Gi"}},
        {"cpu": {"cores": 0.5}},
        {"cpu": {"cores": None}},
        {"cpu": {"bindMemory": "no"}},
        {"setings": {"policy": "dense"}},
        {"service": {"type": "Headless"}},
        {"strategy": {"type": "Replace"}},
        {"strategy": {"rollingUpdate": {"maxSurge": "one"}}},
        {"strategy": {"rollingUpdate": None}},
        {"extraArgs": "--max-model-len=4096"},
        {"maxModelLen": 0},
        {"maxModelLen": None},
        {"maxModelLen": "automatic"},
    ],
    ids=json.dumps,
)
def test_a_bad_value_is_refused(values: dict[str, Any]) -> None:
    refusal = helm("refusal", {"model": CLAIM} | values)
    assert "schema" in refusal
    assert next(iter(values)) in refusal


def test_the_values_of_the_chart_are_legal() -> None:
    assert helm("refusal", {"model": CLAIM}) == helm("refusal", EVERYTHING) == ""


def test_the_chart_is_of_this_version() -> None:
    chart = load_yaml(CHART / "Chart.yaml")
    source = (Path(ROOT) / "vllm_hybrid_sparse" / "__init__.py").read_text(encoding="utf-8")
    assert f'"{chart["appVersion"]}"' in source
