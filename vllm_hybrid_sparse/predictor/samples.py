"""Training samples of one prompt, and the shard file that stores them."""

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.whole_file import whole_file


@dataclass(frozen=True, slots=True)
class Samples:
    """Features and labels of decode steps for each step, layer and query head."""

    features: NDArray[np.float32]  # [steps, layers, q_heads, 41]
    budgets: NDArray[np.float32]  # [steps, layers, q_heads, 5], as HeadLabels
    settled: NDArray[np.float32]  # [steps, layers, q_heads, 4], as HeadLabels
    host_tokens: NDArray[np.int64]  # [steps]

    @classmethod
    def joined(cls, parts: list["Samples"]) -> "Samples":
        """The steps of all parts, in their order; at least one part."""
        return cls(*(np.concatenate([getattr(part, entry.name) for part in parts]) for entry in fields(cls)))

    def save(self, path: Path) -> None:
        """Write the shard; it appears whole or not at all."""
        with whole_file(path) as scratch, scratch.open("wb") as file:
            np.savez(file, **{entry.name: getattr(self, entry.name) for entry in fields(self)})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a shard; raises ConfigError if the file is not one."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**{entry.name: arrays[entry.name] for entry in fields(cls)})
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"shard={path}: must be a shard that `hybrid-sparse calibrate` wrote ({error})"
            ) from error
