"""The eight needle-in-a-haystack tasks: numbers or UUIDs by key, hidden in noise, in prose or among other needles."""

import random
import uuid
from dataclasses import dataclass

from vllm_hybrid_sparse.load.ruler.haystacks import Filler, hide, noise
from vllm_hybrid_sparse.load.ruler.question import Question
from vllm_hybrid_sparse.load.ruler.words import described_things


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask:
    """What is hidden, in what, and how much of it is asked for."""

    haystack: str = "prose"  # prose (or the user's text), noise, needles
    kind: str = "number"  # of a value: number (seven digits), code (UUID)
    keys: int = 1  # hidden in prose or noise, including those asked for
    values: int = 1  # of each key asked for
    asked_keys: int = 1

    def build(self, rng: random.Random, filler: Filler, units: int, depth: float) -> Question:
        """Hide among `units` sentences, or `units` other needles; the first key's first value lies at `depth`."""
        others = units if self.haystack == "needles" else self.keys - self.asked_keys
        seed = rng.randrange(2**31)
        things = described_things(rng, self.asked_keys + others)
        asked = things[: self.asked_keys]
        values = [self._value(rng) for _ in range(self.asked_keys * self.values)]
        facts = [self._needle(asked[place // self.values], value) for place, value in enumerate(values)]
        depths = [depth, *(rng.random() for _ in values[1:])]
        distractors = [self._needle(thing, self._value(rng)) for thing in things[self.asked_keys :]]
        if self.haystack == "needles":
            context = hide(distractors, facts, depths)
        else:
            sentences = (noise if self.haystack == "noise" else filler)(units, seed)
            depths += [rng.random() for _ in distractors]
            context = hide(sentences, facts + distractors, depths)
        names = _listed([f"the {thing}" for thing in asked])
        several = len(values) > 1
        return Question(
            f"Secret {self.kind}s are hidden in the following text. Remember them: you will be asked for some.",
            context,
            f"What {f'are all secret {self.kind}s' if several else f'is the secret {self.kind}'} of {names}?",
            f"The secret {self.kind}s of {names} are" if several else self._needle(asked[0], "")[:-2],
            tuple(values),
            tuple(facts),
        )

    def _value(self, rng: random.Random) -> str:
        if self.kind == "code":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        return str(rng.randrange(1_000_000, 10_000_000))

    def _needle(self, thing: str, value: str) -> str:
        if self.haystack == "needles":  # among hundreds like it, a small model finds only the shortest sentences
            return f"The {thing} has the {self.kind} {value}."
        return f"One secret {self.kind} of the {thing} is {value}."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
