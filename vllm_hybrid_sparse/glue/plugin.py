"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes, maybe repeatedly.

Nothing of vLLM but its version is looked at here, since another release may lack the rest.
"""

import logging
from functools import cache

from vllm_hybrid_sparse import __version__
from vllm_hybrid_sparse.glue.log import log_as_vllm

VLLM_RELEASE = "0.32"  # the release whose decisions `platform_hook` wraps

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend's name, and hook vLLM's platform, CPU or CUDA, so that it can select the backend.

    If the backend is not selected, nothing changes. Nor does anything change in another release of vLLM: an error here
    would end each of its processes, whatever backend is selected.
    """
    from vllm import __version__ as vllm_version  # noqa: PLC0415  (as it is at the call)

    log_as_vllm()
    if vllm_version.partition("+")[0].split(".")[:2] != VLLM_RELEASE.split("."):
        warn_of_release(vllm_version)
        return
    from vllm_hybrid_sparse.glue.platform_hook import add_backend  # noqa: PLC0415  (imports what this release has)

    add_backend()


@cache
def warn_of_release(vllm_version: str) -> None:
    """Log once why vLLM will not know the backend."""
    logger.warning(
        "vllm-hybrid-sparse %s serves vLLM %s, and this is vLLM %s: it adds nothing, and --attention-backend "
        "hybrid_sparse is unknown here",
        __version__,
        VLLM_RELEASE,
        vllm_version,
    )
