"""What each of vLLM's platforms decides with the plugin, if the backend is selected and if it is not."""

import logging
import os
import subprocess
import sys
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm import platforms
from vllm.utils import cpu_resource_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.glue.fake_config import SELECTOR, config_of, parallel_of, platform_of
from vllm_hybrid_sparse import __version__
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import platform_hook, plugin
from vllm_hybrid_sparse.glue.cpu_threads import SPIN_COUNT, SPIN_COUNT_VARIABLE
from vllm_hybrid_sparse.glue.log import log_as_vllm
from vllm_hybrid_sparse.glue.platform_hook import CPU_WORKER_PATH, CUDA_WORKER_PATH
from vllm_hybrid_sparse.glue.registration import BACKEND_PATH, member
from vllm_hybrid_sparse.glue.scheduler_choice import ASYNC_SCHEDULER_PATH, SCHEDULER_PATH
from vllm_hybrid_sparse.runtime.cores import RESERVED_VARIABLE


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.1", True),
        ("0.32.1rc2.dev3+g0123abc", True),
        ("0.31.4", False),
        ("0.33.0", False),
        ("0.3.2", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_another_release_of_vllm_is_left_alone(
    version: str, served: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's processes end if a plugin raises any error."""
    done: list[str] = []

    class Platform:
        is_cpu = staticmethod(lambda: True)
        is_cuda = staticmethod(lambda: False)

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(platforms, "current_platform", Platform())
    monkeypatch.setattr(platform_hook, "member", lambda: done.append("member"))
    monkeypatch.setattr(platform_hook, "hook_platform", lambda *_, **__: done.append("hooks"))
    plugin.warn_of_release.cache_clear()
    with caplog.at_level(logging.WARNING, logger="vllm_hybrid_sparse"):
        plugin.register()
        assert done == (["member", "hooks"] if served else [])
        plugin.register()
    wanted = (
        f"vllm-hybrid-sparse {__version__} serves vLLM 0.32, and this is vLLM {version}: it adds nothing, and "
        "--attention-backend hybrid_sparse is unknown here"
    )
    assert [record.getMessage() for record in caplog.records] == ([] if served else [wanted])


def test_of_another_release_nothing_is_imported_that_it_may_lack() -> None:
    code = (
        "import sys, vllm\n"
        "vllm.__version__ = '0.99.0'\n"
        "from vllm_hybrid_sparse.glue.plugin import register\n"
        "register()\n"
        "print(*(name for name in sys.modules if name.startswith(('vllm.v1', 'vllm.config', 'vllm.platforms'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""
    assert "it adds nothing" in done.stderr


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("on_cuda", "path"), [(True, CUDA_WORKER_PATH), (False, CPU_WORKER_PATH)])
def test_each_platform_gets_its_worker(on_cuda: bool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, config = platform_of(monkeypatch, on_cuda=on_cuda), config_of(member())
    platform.check_and_update_config(config)
    platform.check_and_update_config(config)  # the engine's process does it again
    assert config.parallel_config.worker_cls == path
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == (ASYNC_SCHEDULER_PATH if on_cuda else None)
    assert platform.asked == [config, config]


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("settings", "ahead"), [({}, True), ({"device_ranking": "host"}, False), ({"policy": "hgca"}, False)]
)
def test_steps_are_launched_ahead_where_the_host_has_no_part_in_them(
    settings: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(member(), additional_config={"hybrid_sparse": settings})
    platform_of(monkeypatch, on_cuda=True).check_and_update_config(config)
    assert config.scheduler_config.async_scheduling is ahead
    assert config.scheduler_config.scheduler_cls == (ASYNC_SCHEDULER_PATH if ahead else SCHEDULER_PATH)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_nothing_changes_where_another_backend_is_selected(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, config = platform_of(monkeypatch, on_cuda=on_cuda), config_of(None)
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "auto"
    assert config.scheduler_config.async_scheduling
    assert platform.get_attn_backend_cls(None, SELECTOR) == "vllm's"


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("on_cuda", "ours", "given", "spins"),
    [
        (False, True, {}, SPIN_COUNT),
        (False, True, {SPIN_COUNT_VARIABLE: "70"}, "70"),
        (False, True, {"OMP_WAIT_POLICY": "active"}, None),
        (False, False, {}, None),
        (True, True, {}, None),
    ],
)
def test_threads_of_workers_on_a_cpu_wait_shortly_unless_the_user_says_otherwise(
    on_cuda: bool, ours: bool, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SPIN_COUNT_VARIABLE, "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
    os.environ.update(given)
    platform_of(monkeypatch, on_cuda=on_cuda).check_and_update_config(config_of(member() if ours else None))
    assert os.environ.get(SPIN_COUNT_VARIABLE) == spins


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("cores", "workers", "given", "reserved"),
    [
        ([0, 1], 1, {}, "0"),
        ([0, 0, 1, 1], 1, {}, "0"),
        ([0, 0], 1, {}, None),
        ([0, 1, 2], 1, {}, None),
        ([0, 1], 2, {}, None),
        ([0, 1], 1, {RESERVED_VARIABLE: "1"}, "1"),
        ([0, 1], 1, {"VLLM_CPU_OMP_THREADS_BIND": "auto"}, "0"),
        ([0, 1], 1, {"VLLM_CPU_OMP_THREADS_BIND": "0"}, None),
    ],
)
def test_no_core_of_two_is_kept_from_a_lone_worker_unless_the_user_says_otherwise(
    cores: list[int], workers: int, given: dict[str, str], reserved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cores` has the physical core of each hardware thread."""
    for name in (RESERVED_VARIABLE, "VLLM_CPU_OMP_THREADS_BIND"):
        os.environ.pop(name, None)
    os.environ.update(given)
    cpus = [SimpleNamespace(id=number, physical_core=core, numa_node=0) for number, core in enumerate(cores)]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
    config = config_of(member(), parallel_config=parallel_of(data_parallel_size_local=workers))
    platform = platform_of(monkeypatch, on_cuda=False)
    platform.check_and_update_config(config)
    config.parallel_config.data_parallel_size_local = 1  # as vLLM resets it in the process of a dense model's rank
    platform.check_and_update_config(config)
    assert os.environ.get(RESERVED_VARIABLE) == reserved


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("spins", "reserved"), [(None, None), (None, ""), ("70", None), (None, "1")])
def test_another_backend_s_workers_start_with_the_environment_that_the_user_left(
    spins: str | None, reserved: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "VLLM_CPU_OMP_THREADS_BIND", SPIN_COUNT_VARIABLE, RESERVED_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(
        {
            name: value
            for name, value in ((SPIN_COUNT_VARIABLE, spins), (RESERVED_VARIABLE, reserved))
            if value is not None
        }
    )
    before = dict(os.environ)
    cpus = [SimpleNamespace(id=number, physical_core=number, numa_node=0) for number in range(2)]
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: cpus)
    platform = platform_of(monkeypatch, on_cuda=False)
    for _ in range(2):
        platform.check_and_update_config(config_of(member()))
        platform.check_and_update_config(config_of(member()))
        assert dict(os.environ) == before | {
            SPIN_COUNT_VARIABLE: spins or SPIN_COUNT,
            RESERVED_VARIABLE: reserved or "0",
        }
        platform.check_and_update_config(config_of(None))
        assert dict(os.environ) == before


@pytest.mark.usefixtures("no_loggers")
def test_what_the_user_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", SPIN_COUNT_VARIABLE):
        os.environ.pop(name, None)
    platform = platform_of(monkeypatch, on_cuda=False)
    platform.check_and_update_config(config_of(member()))
    os.environ[SPIN_COUNT_VARIABLE] = "70"
    platform.check_and_update_config(config_of(None))
    assert os.environ[SPIN_COUNT_VARIABLE] == "70"


@pytest.mark.usefixtures("no_loggers")
def test_a_worker_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    config = config_of(member(), parallel_config=parallel_of(worker_cls="theirs"))
    platform.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "theirs"


@pytest.mark.usefixtures("no_loggers")
def test_a_device_that_cuda_does_not_take_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    config = config_of(member(), additional_config={"hybrid_sparse": {"device": "emulated"}})
    with pytest.raises(ConfigError, match=r"hybrid_sparse\.device='emulated'"):
        platform.check_and_update_config(config)
    assert platform.asked == []


def test_a_backend_for_some_kinds_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    chosen = SimpleNamespace(backend=None, backend_per_kind={"full_attention": member()})
    with pytest.raises(ConfigError, match=r"attention_config\.backend_per_kind: hybrid_sparse serves all layers"):
        platform.check_and_update_config(config_of(None, attention_config=chosen))


@pytest.mark.parametrize("other", ["FLASH_ATTN", "CPU_ATTN"])
def test_another_backend_for_some_kinds_of_layers_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=False)
    kinds = {"sliding_window": AttentionBackendEnum[other]}
    chosen = SimpleNamespace(backend=member(), backend_per_kind=kinds)
    with pytest.raises(
        ConfigError, match=r"attention_config\.backend_per_kind=sliding_window: hybrid_sparse serves all"
    ):
        platform.check_and_update_config(config_of(member(), attention_config=chosen))
    assert platform.asked == []
    others = config_of(None, attention_config=SimpleNamespace(backend=None, backend_per_kind=kinds))
    platform.check_and_update_config(others)
    assert platform.asked == [others]


def test_a_backend_for_drafts_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    drafts = SimpleNamespace(method="eagle3", attention_backend=member())
    with pytest.raises(ConfigError, match=r"^speculative_config\.attention_backend=hybrid_sparse: .* no draft model"):
        platform.check_and_update_config(config_of(None, speculative_config=drafts))
    assert platform.asked == []
    drafts.attention_backend = None
    platform.check_and_update_config(config_of(None, speculative_config=drafts))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(("given", "ours", "said"), [("1", True, 1), ("0", True, 0), (None, True, 0), ("1", False, 0)])
def test_a_front_end_without_our_metrics_is_warned_of_once(
    given: str | None, ours: bool, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ.pop("VLLM_USE_RUST_FRONTEND", None)
    if given is not None:
        os.environ["VLLM_USE_RUST_FRONTEND"] = given
    platform_hook.warn_of_rust_front_end.cache_clear()
    platform = platform_of(monkeypatch, on_cuda=False)
    with caplog.at_level(logging.WARNING, logger="vllm_hybrid_sparse"):
        for _ in range(2):
            platform.check_and_update_config(config_of(member() if ours else None))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["VLLM_USE_RUST_FRONTEND=1"] * said


def test_blocks_are_sized_with_our_configuration_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our backend needs it to say how large a summary is. vLLM asks other backends without it."""
    platform = platform_of(monkeypatch, on_cuda=False)
    ours = config_of(member())
    platform.update_block_size_for_backend(ours)
    platform.update_block_size_for_backend(config_of(None))
    assert platform.asked == [ours, None]


@pytest.mark.parametrize(("additional", "said"), [({"hybrid_sparse": {}}, 1), ({"other": {}}, 0), ({}, 0), (None, 0)])
def test_settings_without_the_backend_are_warned_of(
    additional: Any, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_hybrid_sparse"):
        platform_of(monkeypatch, on_cuda=False).check_and_update_config(config_of(None, additional_config=additional))
    lines = [record.getMessage() for record in caplog.records]
    wanted = "additional_config.hybrid_sparse: without effect, since --attention-backend is not hybrid_sparse"
    assert lines == [wanted] * said


def test_on_cuda_vllm_asks_the_backend_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(monkeypatch, on_cuda=True)
    assert platform.get_attn_backend_cls(member(), SELECTOR) == BACKEND_PATH
    assert platform.asked == [member()]
    platform.refuses = True
    with pytest.raises(ValueError, match="compute capability not supported"):
        platform.get_attn_backend_cls(member(), SELECTOR)
    on_cpu = platform_of(monkeypatch, on_cuda=False)
    assert on_cpu.get_attn_backend_cls(member(), SELECTOR) == BACKEND_PATH
    assert on_cpu.asked == []


def test_warnings_of_ours_appear_in_vllm_s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, root = logging.getLogger("vllm_hybrid_sparse"), logging.getLogger("vllm"), logging.getLogger()
    monkeypatch.setattr(ours, "parent", root)
    of_vllm, of_root = BufferingHandler(capacity=10), BufferingHandler(capacity=10)
    monkeypatch.setattr(root, "handlers", [of_root])
    for _ in range(2):
        log_as_vllm()
    # A front end configures its log after it has loaded plugins, and may do so again.
    monkeypatch.setattr(theirs, "handlers", [of_vllm])
    monkeypatch.setattr(theirs, "propagate", False)
    level = theirs.level
    try:
        theirs.setLevel(logging.WARNING)
        module = logging.getLogger("vllm_hybrid_sparse.runtime.tiers")
        module.info("a load began")
        module.warning("a load failed")
    finally:
        theirs.setLevel(level)
    assert [record.getMessage() for record in of_vllm.buffer] == ["a load failed"]
    assert of_root.buffer == []
