"""The text in which facts are hidden: generated prose, or a text of the user's."""

import random
import re
from pathlib import Path

from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.load.ruler.haystacks import Filler


def from_text(path: Path) -> Filler:
    """Sentences of a text from a place that the seed chooses, from its start again after its end."""
    parts = [part for part in re.split(r"(?<=[.!?])\s+", path.read_text(encoding="utf-8")) if part.strip()]
    if not parts:
        raise ValueError(f"text={path.name}: must hold a sentence")

    def filler(sentences: int, seed: int) -> list[str]:
        start = random.Random(seed).randrange(len(parts))
        return [parts[(start + place) % len(parts)].strip() for place in range(sentences)]

    return filler


def prose_or_text(path: Path | None) -> Filler:
    """Generated prose, or the text at `path`."""
    return prose if path is None else from_text(path)
