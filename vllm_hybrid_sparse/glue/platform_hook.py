"""What vLLM's platforms decide with the backend: its class, the configuration that it serves, the size of a block."""

import logging
import os
from functools import cache
from typing import Any

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.cpu_threads import prepare_threads
from vllm_hybrid_sparse.glue.environment import take_back
from vllm_hybrid_sparse.glue.local_workers import record_local_engines
from vllm_hybrid_sparse.glue.registration import BACKEND_NAME, BACKEND_PATH, is_selected, member
from vllm_hybrid_sparse.glue.stat_logger_hook import hook_stat_loggers
from vllm_hybrid_sparse.setting import SECTION

CPU_WORKER_PATH = "vllm_hybrid_sparse.glue.cpu_worker.HybridSparseCPUWorker"
CUDA_WORKER_PATH = "vllm_hybrid_sparse.glue.cuda_worker.HybridSparseCUDAWorker"

_RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
_HOOKED = "_hybrid_sparse_hooked"

logger = logging.getLogger(__name__)


def add_backend() -> None:
    """Register the backend's name, and hook vLLM's platform if it is one of those that the backend serves."""
    member()
    from vllm.platforms import current_platform  # noqa: PLC0415  (resolves the platform: not before plugins load)

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    platform = type(current_platform)
    if not platform.__dict__.get(_HOOKED, False):
        hook_platform(platform, on_cuda=current_platform.is_cuda())
        setattr(platform, _HOOKED, True)


def warn_of_unused_settings(additional_config: Any) -> None:
    """Warn if our settings are given but our backend is not selected."""
    if isinstance(additional_config, dict) and SECTION in additional_config:
        logger.warning(
            "additional_config.%s: without effect, since --attention-backend is not %s", SECTION, BACKEND_NAME.lower()
        )


@cache
def warn_of_rust_front_end() -> None:
    """Log once that vLLM's other front end, which is no Python, counts nothing of ours."""
    logger.warning(
        "%s=1: that front end's /metrics has none of hybrid_sparse's metrics; the log has the same figures",
        _RUST_FRONT_END,
    )


def _refuse_backends_beside(attention: Any, speculative: Any) -> None:
    """Refuse a second backend beside this one, for some kinds of layers or for drafts, in either role.

    attention     vLLM's AttentionConfig
    speculative   its SpeculativeConfig, or None
    """
    if any(is_selected(backend) for backend in attention.backend_per_kind.values()):
        raise ConfigError(
            "attention_config.backend_per_kind: hybrid_sparse serves all layers of a model or none: choose it by "
            "--attention-backend"
        )
    if is_selected(attention.backend):
        if kinds := ", ".join(attention.backend_per_kind):
            raise ConfigError(
                f"attention_config.backend_per_kind={kinds}: hybrid_sparse serves all layers of a model or none: "
                "--attention-backend hybrid_sparse needs no backend for a kind"
            )
    elif speculative is not None and is_selected(speculative.attention_backend):
        raise ConfigError(
            "speculative_config.attention_backend=hybrid_sparse: hybrid_sparse serves no draft model, and nothing "
            "beside another --attention-backend"
        )


def hook_platform(platform: Any, *, on_cuda: bool) -> None:
    """Wrap what a vLLM platform decides: the backend's class, the configuration it serves, the size of a block."""
    choose_backend = platform.get_attn_backend_cls.__func__
    update_config = platform.check_and_update_config.__func__
    settle_block_size = platform.update_block_size_for_backend.__func__

    def get_attn_backend_cls(cls: Any, /, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        if not is_selected(selected_backend):
            path: str = choose_backend(cls, selected_backend, attn_selector_config, **kwargs)
            return path
        from vllm_hybrid_sparse.glue.support import refuse_layer  # noqa: PLC0415  (imports torch)

        refuse_layer(attn_selector_config)
        if on_cuda:  # vLLM asks the backend here what it supports; its CPU platform knows only its own
            choose_backend(cls, selected_backend, attn_selector_config, **kwargs)
        return BACKEND_PATH

    def check_and_update_config(cls: Any, /, vllm_config: Any) -> None:
        _refuse_backends_beside(vllm_config.attention_config, vllm_config.speculative_config)
        if not is_selected(vllm_config.attention_config.backend):
            warn_of_unused_settings(vllm_config.additional_config)
            take_back()
        else:
            from vllm_hybrid_sparse.glue.settings import settings_of  # noqa: PLC0415
            from vllm_hybrid_sparse.glue.support import refuse_config  # noqa: PLC0415

            refuse_config(vllm_config)
            record_local_engines(vllm_config.parallel_config)
            hook_stat_loggers()
            if os.environ.get(_RUST_FRONT_END, "0") not in ("", "0"):
                warn_of_rust_front_end()
            if not on_cuda:
                prepare_threads(vllm_config.parallel_config)
            if vllm_config.parallel_config.worker_cls == "auto":
                vllm_config.parallel_config.worker_cls = CUDA_WORKER_PATH if on_cuda else CPU_WORKER_PATH
            if on_cuda and settings_of(vllm_config).device_ranking != "device":
                # The host takes part in every layer, so a step cannot be launched before the previous one has ended.
                vllm_config.scheduler_config.async_scheduling = False
        update_config(cls, vllm_config)
        if is_selected(vllm_config.attention_config.backend):
            from vllm_hybrid_sparse.glue.scheduler_choice import choose_scheduler  # noqa: PLC0415

            choose_scheduler(vllm_config)  # after vLLM has settled async scheduling

    def update_block_size_for_backend(cls: Any, /, vllm_config: Any) -> None:
        if not is_selected(vllm_config.attention_config.backend):
            settle_block_size(cls, vllm_config)
            return
        from vllm.config import set_current_vllm_config  # noqa: PLC0415

        with set_current_vllm_config(vllm_config):  # it says how large a page's summary is
            settle_block_size(cls, vllm_config)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.update_block_size_for_backend = classmethod(update_block_size_for_backend)
