"""Asks a server how many tokens the prompts of each task have."""

from vllm_hybrid_sparse.load.mixes import Lengths
from vllm_hybrid_sparse.load.requests import Request
from vllm_hybrid_sparse.load.ruler.haystacks import Filler
from vllm_hybrid_sparse.load.side import Say, Side
from vllm_hybrid_sparse.load.task_mix import TaskWeights, prompt_of_characters, shortest_prompt
from vllm_hybrid_sparse.load.task_tokens import USUAL_CHARACTERS_PER_TOKEN, TaskTokens

_MOST_MORE_CHARACTERS = 8000  # of the longer of two samples: about 2000 tokens


async def measured_tokens(
    side: Side, tasks: TaskWeights, lengths: Lengths, filler: Filler, seed: int, *, say: Say
) -> dict[str, TaskTokens]:
    """Return how long the prompts of each task are, by the server's own count of two samples of it.

    lengths   those that prompts will be made for; no sample is longer than the longest
    say       is told of the samples, and of tasks whose prompts the server does not count
    """
    names = list(dict.fromkeys(tasks.names))
    found = {}
    for number, task in enumerate(names, start=1):
        say(f"{side.name}: counting the tokens of {task} ({number} of {len(names)})")
        found[task] = await _tokens_of(side, task, max(lengths.tokens), filler, seed, say)
    return found


async def _tokens_of(side: Side, task: str, longest: int, filler: Filler, seed: int, say: Say) -> TaskTokens:
    shorter = shortest_prompt(task, filler, seed)
    tokens = await _count(side, shorter)
    if not tokens:
        usual = f"a token counts as {USUAL_CHARACTERS_PER_TOKEN:g} characters"
        say(f"{side.name}: does not count prompts of {task}; {usual}")
        return TaskTokens.usual()
    more = min(_MOST_MORE_CHARACTERS, longest - tokens)  # hardly any text has more tokens than characters
    if more <= 0:
        return TaskTokens.between((shorter, tokens), None)
    try:
        longer = prompt_of_characters(task, len(shorter) + more, filler, seed)
    except ValueError:  # too short for it, since questions differ in length
        return TaskTokens.between((shorter, tokens), None)
    more_tokens = await _count(side, longer)
    return TaskTokens.between((shorter, tokens), (longer, more_tokens) if more_tokens else None)


async def _count(side: Side, prompt: str) -> int | None:
    record = await side.ask(Request(prompt=prompt, max_tokens=1))
    return record.prompt_tokens
