"""Checks, before a command begins, that its output can be written at the end."""

import os
from pathlib import Path

from vllm_hybrid_sparse.errors import ConfigError


def writable(option: str, path: Path) -> Path:
    """Return the path that was given for `option`; ConfigError if no file can be written there."""
    try:
        folder = path.resolve().parent  # a link is followed when the file is written
    except RuntimeError as error:  # a link that leads to itself
        raise ConfigError(f"{option}={path}: must be a file's path ({error})") from error
    if (path.exists() and not path.is_file()) or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{option}={path}: must be a file in a folder that exists and can be written")
    return path
