"""Chooses the engine's scheduler: ours if requests are admitted by working set, otherwise the one that vLLM takes."""

from typing import Any

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.settings import settings_of

SCHEDULER_PATH = "vllm_hybrid_sparse.glue.scheduler.HybridSparseScheduler"
ASYNC_SCHEDULER_PATH = "vllm_hybrid_sparse.glue.scheduler.HybridSparseAsyncScheduler"


def choose_scheduler(vllm_config: Any) -> None:
    """Set `scheduler_cls` once async scheduling is settled; a second call changes nothing.

    raises   ConfigError if the user chose a scheduler, which would be replaced silently
    """
    if settings_of(vllm_config).admission != "working_set":
        return
    scheduling = vllm_config.scheduler_config
    if scheduling.scheduler_cls not in (None, SCHEDULER_PATH, ASYNC_SCHEDULER_PATH):
        raise ConfigError(
            f"scheduler_cls={scheduling.scheduler_cls}: hybrid_sparse.admission='working_set' is a scheduler of its "
            "own; to keep yours, set hybrid_sparse.admission to none"
        )
    scheduling.scheduler_cls = ASYNC_SCHEDULER_PATH if scheduling.async_scheduling else SCHEDULER_PATH
