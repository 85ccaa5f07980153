"""Variable tracing: assignments that pass one value on are scattered in noise; the task asks for all its variables."""

import random

from vllm_hybrid_sparse.load.ruler.haystacks import Filler, hide, noise
from vllm_hybrid_sparse.load.ruler.question import Question

HOPS = 4  # RULER's
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def build_tracing(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - always noise
    """One chain of `HOPS` hops among `units` sentences; `depth` places the first assignment before the others.

    A worked example with other names comes first, as in RULER.
    """
    names, example_names = _names(rng), _names(rng)
    value, example_value = str(rng.randrange(10_000, 50_000)), str(rng.randrange(50_000, 100_000))
    later = sorted(rng.random() for _ in range(HOPS))
    depths = [depth * later[0], *later]
    assignments = _chain(names, value)
    example = (
        f"{hide(noise(8, 0), _chain(example_names, example_value), [0.1, 0.3, 0.5, 0.7, 0.9])}\n\n"
        f"{_asked(example_value)}\n{_begin(example_value)} {', '.join(example_names)}."
    )
    return Question(
        "Variables are given values in the following text. Keep track of them: you will be asked which have one value."
        f"\n\n{example}",
        hide(noise(units, 0), assignments, depths),
        _asked(value),
        _begin(value),
        tuple(names),
        tuple(assignments),
    )


def _names(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(_LETTERS, k=5)) for _ in range(HOPS + 1)]


def _chain(names: list[str], value: str) -> list[str]:
    sources = [value, *names[:-1]]
    return [f"LET {name} = {source}." for name, source in zip(names, sources, strict=True)]


def _asked(value: str) -> str:
    return f"Which variables have the value {value}, directly or through others?"


def _begin(value: str) -> str:
    return f"The {HOPS + 1} variables that have the value {value} are"
