"""Texts in which facts are hidden: sentences of whoever asks for the task, or a few sentences over and over."""

from collections.abc import Callable, Sequence

Filler = Callable[[int, int], list[str]]
"""Returns that many sentences for a seed; with the same seed, fewer sentences are the first of more."""

_NOISE = ("The kettle is on.", "Rain falls on the roof.", "The cat sleeps by the door.", "We wait and then go on.")


def noise(sentences: int, seed: int) -> list[str]:  # noqa: ARG001 - a Filler
    """Return the same few sentences over and over."""
    return [_NOISE[place % len(_NOISE)] for place in range(sentences)]


def hide(sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Return the sentences in paragraphs, with each needle at its depth (0 the start, 1 the end)."""
    parts = list(sentences)
    placed = sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0], reverse=True)
    for depth, needle in placed:  # from the end, so that no place moves
        parts.insert(round(depth * len(sentences)), needle)
    paragraph = 8
    return "\n".join(" ".join(parts[start : start + paragraph]) for start in range(0, len(parts), paragraph))
