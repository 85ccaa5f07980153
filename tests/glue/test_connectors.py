"""Which KV connectors are refused without a GPU: vLLM's own that cannot work, and none of the user's."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.glue.fake_config import config_of, platform_of
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.connectors import UNSERVED, unserved_connector
from vllm_hybrid_sparse.glue.registration import member

SERVED = {"DecodeBenchConnector", "ExampleConnector", "MultiConnector"}
NOT_JUDGED = {"LMCacheMPConnector"}  # the package lmcache decides what it is, and how it moves blocks


def transfer_of(name: str, **given: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **given)


def test_every_connector_of_vllm_is_known() -> None:
    """If a release of vLLM brings another, someone has to look whether it can work."""
    assert KVConnectorFactory._registry.keys() == UNSERVED.keys() | SERVED | NOT_JUDGED


def wrapped(name: str) -> Iterator[KVTransferConfig]:
    """A connector by itself, as the second of a MultiConnector, and as one of a MultiConnector in that."""
    yield transfer_of(name)
    inner = [{"kv_connector": "ExampleConnector"}, {"kv_connector": name, "kv_role": "kv_both"}]
    yield transfer_of("MultiConnector", kv_connector_extra_config={"connectors": inner})
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    yield transfer_of("MultiConnector", kv_connector_extra_config={"connectors": [outer]})


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_one_that_cannot_work_is_refused_wherever_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = list(wrapped(name))  # made from vLLM's own platform
    platform = platform_of(monkeypatch, on_cuda=False)
    for transfer in transfers:
        with pytest.raises(ConfigError, match=rf"^kv_connector={name}: .*\(attention backend hybrid_sparse\)"):
            platform.check_and_update_config(config_of(member(), kv_transfer_config=transfer))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("name", sorted(SERVED | NOT_JUDGED))
def test_the_others_are_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = list(wrapped(name))  # made from vLLM's own platform
    platform = platform_of(monkeypatch, on_cuda=False)
    for transfer in transfers:
        platform.check_and_update_config(config_of(member(), kv_transfer_config=transfer))


def test_what_the_user_brings_is_not_judged() -> None:
    own: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_connector_module_path": "theirs"}
    assert unserved_connector(KVTransferConfig(**own, kv_role="kv_both")) is None
    assert unserved_connector(transfer_of("MultiConnector", kv_connector_extra_config={"connectors": [own]})) is None
    spec = {"spec_name": "Theirs", "spec_module_path": "theirs"}
    assert unserved_connector(transfer_of("OffloadingConnector", kv_connector_extra_config=spec)) is None
