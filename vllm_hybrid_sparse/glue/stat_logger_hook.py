"""Puts our logger, which takes the workers' reports off the statistics of steps, into vLLM's front ends."""

from functools import wraps
from typing import Any

from vllm_hybrid_sparse.glue.registration import is_selected

_HOOKED = "_hybrid_sparse_hooked"


def hook_stat_loggers() -> None:
    """Put our logger first in the list of loggers to which a front end gives every step's statistics.

    An entry point of the group `vllm.stat_logger_plugins` would do this too, but for every vLLM that has us installed:
    if vLLM finds one, it collects statistics even under --disable-log-stats.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager  # noqa: PLC0415  (a process without the backend: never)

    if getattr(StatLoggerManager, _HOOKED, False):
        return
    make = StatLoggerManager.__init__

    @wraps(make)
    def make_with_ours(
        self: Any, vllm_config: Any, engine_idxs: Any = None, custom_stat_loggers: Any = None, **kwargs: Any
    ) -> None:
        if is_selected(vllm_config.attention_config.backend):
            from vllm_hybrid_sparse.glue.stat_logger import HybridSparseStatLogger  # noqa: PLC0415

            custom_stat_loggers = [HybridSparseStatLogger, *(custom_stat_loggers or ())]
        make(self, vllm_config, engine_idxs, custom_stat_loggers, **kwargs)

    StatLoggerManager.__init__ = make_with_ours
    setattr(StatLoggerManager, _HOOKED, True)
