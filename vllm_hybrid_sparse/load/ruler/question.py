"""What one task asks, and how an answer is scored."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """One text and a question about it."""

    instruction: str  # before the context
    context: str
    asked: str  # after it
    answer_begin: str  # the answer is begun for the model, as RULER does
    references: tuple[str, ...]  # what a right answer contains
    facts: tuple[str, ...]  # passages of the context that the answer is in

    def prompt(self) -> str:
        """Instruction, context and question, without the begun answer."""
        return f"{self.instruction}\n\n{self.context}\n\n{self.asked}"


def all_references(answer: str, references: tuple[str, ...]) -> float:
    """Share of the references that the answer contains, whatever their case (RULER's `string_match_all`)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_reference(answer: str, references: tuple[str, ...]) -> float:
    """1 if the answer contains any of the references, else 0 (RULER's `string_match_part`)."""
    return float(any(reference.lower() in answer.lower() for reference in references))
