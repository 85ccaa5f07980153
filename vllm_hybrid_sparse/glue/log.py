"""One log for vLLM and for what of ours imports no vLLM."""

import logging


def log_as_vllm() -> None:
    """Have warnings of the whole package appear as vLLM's do, and from the level on that it logs from."""
    ours, theirs = logging.getLogger("vllm_hybrid_sparse"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    ours.setLevel(theirs.level)
