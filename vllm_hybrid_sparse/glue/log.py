"""One log for vLLM and for those of our modules that import no vLLM."""

import logging


def log_as_vllm() -> None:
    """Send the log of the whole package to whatever vLLM's log has, now or later: handlers, level, propagation.

    In a front end vLLM loads plugins before it configures its log, so there is nothing to copy yet. Instead our logger
    becomes a child of vLLM's.
    """
    logging.getLogger("vllm_hybrid_sparse").parent = logging.getLogger("vllm")
