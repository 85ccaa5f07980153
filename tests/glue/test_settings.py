"""Which device each of vLLM's platforms gets."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.settings import settings_of, settings_on
from vllm_hybrid_sparse.settings import POLICIES


def test_a_cuda_platform_gets_cuda_and_no_other_does() -> None:
    assert settings_on({}, on_cuda=True).device == "cuda"
    assert settings_on({"device": None}, on_cuda=True).device == "cuda"
    assert settings_on({"device": "cuda"}, on_cuda=True).device == "cuda"
    assert settings_on({}, on_cuda=False).device == "none"
    assert settings_on({"device": "emulated"}, on_cuda=False).device == "emulated"


@pytest.mark.parametrize("device", ["none", "emulated"])
def test_a_host_device_is_refused_on_cuda(device: str) -> None:
    with pytest.raises(ConfigError, match=f"hybrid_sparse.device='{device}': must be cuda on vLLM's CUDA platform"):
        settings_on({"device": device}, on_cuda=True)


def test_cuda_is_refused_on_this_machine_s_platform() -> None:
    config = SimpleNamespace(additional_config={"hybrid_sparse": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"hybrid_sparse\.device='cuda': needs vLLM's CUDA build and a GPU"):
        settings_of(config)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"hybrid-sparse": {"policy": "dense"}}, r"additional_config\.hybrid-sparse=.*did you mean hybrid_sparse\?"),
        ({"HybridSparse": {"policy": "dense"}}, r"additional_config\.HybridSparse=.*did you mean hybrid_sparse\?"),
        ({"hybrid_spars": {}, "hybrid_sparse": {}}, r"additional_config\.hybrid_spars=.*did you mean hybrid_sparse\?"),
        ({"policy": "dense"}, r"additional_config\.policy='dense': must be in the section hybrid_sparse"),
    ],
)
def test_settings_beside_their_section_are_refused(given: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        settings_of(SimpleNamespace(additional_config=given))


def test_a_setting_beside_its_section_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(additional_config={"hybrid_sparse": {}, "threshold": 0.123, "other": 1})
    assert [settings_of(config).threshold for _ in range(3)] == [0.95] * 3
    said = "additional_config.threshold=0.123 has no effect: settings are in the section hybrid_sparse"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_other_plugins_are_told_is_theirs() -> None:
    others = {"other_plugin": {"policy": "x"}, "sparse": 1, "policy": "theirs"}
    assert settings_of(SimpleNamespace(additional_config={"other_plugin": 1})).policy == "progressive"
    assert (
        settings_of(SimpleNamespace(additional_config=others | {"hybrid_sparse": {"policy": "dense"}})).policy
        == "dense"
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_cuda_serves_every_policy(policy: str) -> None:
    assert settings_on({"policy": policy}, on_cuda=True).device == "cuda"
