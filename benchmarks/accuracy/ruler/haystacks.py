"""Texts in which facts are hidden: prose, a text of the user's, or a few sentences over and over."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_hybrid_sparse.cli.prose import prose

Filler = Callable[[int, int], list[str]]
"""Returns that many sentences for a seed; with the same seed, fewer sentences are the first of more."""

_NOISE = ("The kettle is on.", "Rain falls on the roof.", "The cat sleeps by the door.", "We wait and then go on.")


def noise(sentences: int, seed: int) -> list[str]:  # noqa: ARG001 - a Filler
    """The same few sentences over and over."""
    return [_NOISE[place % len(_NOISE)] for place in range(sentences)]


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


def hide(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """The sentences in paragraphs, with each needle at its depth (0 the start, 1 the end)."""
    parts = list(sentences)
    placed = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0], reverse=True)
    for depth, needle in placed:  # from the end, so that no place moves
        parts.insert(round(depth * len(sentences)), needle)
    paragraph = 8
    return "\n".join(" ".join(parts[start : start + paragraph]) for start in range(0, len(parts), paragraph))
