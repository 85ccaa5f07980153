"""The name HYBRID_SPARSE in vLLM's list of attention backends.

vLLM pickles the chosen member into the processes that it spawns, and they unpickle it before plugins are loaded. An
enum member pickles by value, which means nothing to a fresh process. So ours pickles as a call to `received_member()`,
which registers the member if that has not happened yet.
"""

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND_NAME = "HYBRID_SPARSE"
BACKEND_PATH = "vllm_hybrid_sparse.glue.backend.HybridSparseBackend"


def member() -> AttentionBackendEnum:
    """The enum member, which the first call in a process registers."""
    registered = AttentionBackendEnum.__members__.get(BACKEND_NAME)
    if registered is None:
        registered = AttentionBackendEnum.register(BACKEND_NAME, BACKEND_PATH)
        registered.__reduce_ex__ = _reduce_to_member
    return registered


def received_member() -> AttentionBackendEnum:
    """Unpickle the member, in a process that was sent its configuration. It may be a front end, so hook its loggers."""
    from vllm_hybrid_sparse.glue.stat_logger_hook import hook_stat_loggers  # noqa: PLC0415  (it imports this module)

    hook_stat_loggers()
    return member()


def _reduce_to_member(_protocol: Any) -> tuple[Any, tuple[()]]:
    return received_member, ()


def is_selected(backend: object) -> bool:
    """Whether `attention_config.backend` names this backend."""
    return backend is not None and backend is AttentionBackendEnum.__members__.get(BACKEND_NAME)
