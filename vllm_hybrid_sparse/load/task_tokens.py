"""How many tokens the prompts of a task have, estimated from a server's own count of two of them."""

from dataclasses import dataclass
from typing import Self

USUAL_CHARACTERS_PER_TOKEN = 4.0  # of English, if a server does not count


@dataclass(frozen=True, slots=True)
class TaskTokens:
    """A line through the lengths of two prompts; more text of a task is more of the same kind."""

    characters: int  # of the shorter prompt, > 0
    tokens: float  # of the shorter prompt, > 0
    characters_per_token: float  # of what the longer prompt has more, > 0

    @classmethod
    def between(cls, shorter: tuple[str, int], longer: tuple[str, int] | None) -> Self:
        """Take two prompts with their tokens. The shorter one alone must do if the other one is no longer."""
        text, tokens = shorter
        if longer is None or len(longer[0]) <= len(text) or longer[1] <= tokens:
            return cls(len(text), tokens, len(text) / tokens)
        return cls(len(text), tokens, (len(longer[0]) - len(text)) / (longer[1] - tokens))

    @classmethod
    def usual(cls) -> Self:
        """Return what holds for English with most tokenizers."""
        return cls(int(USUAL_CHARACTERS_PER_TOKEN), 1.0, USUAL_CHARACTERS_PER_TOKEN)

    def of(self, prompt: str) -> float:
        """Return about how many tokens a prompt has."""
        return self.tokens + (len(prompt) - self.characters) / self.characters_per_token
