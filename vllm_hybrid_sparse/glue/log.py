"""One log for vLLM and for those of our modules that import no vLLM."""

import logging


def log_as_vllm() -> None:
    """Send the log of the whole package to vLLM's handlers, from vLLM's log level on."""
    ours, theirs = logging.getLogger("vllm_hybrid_sparse"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    ours.setLevel(theirs.level)
