"""The prompts of `gpu_serving`, their right answers, and how far other answers are from these.

The right answers are those of transformers with the same weights on the CPU, in float32. A backend's error is the
largest difference between its log-probabilities and the right ones, over the tokens that both show at a place. Places
count up to and including the first at which the backend chose another token.
"""

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 512
NEW_TOKENS = 24
SHOWN = 5  # most likely tokens that are kept for every place

EXACT = 1e-3
"""The error that float32 sums in another order may cause here; 0.0001 was seen, on CPUs and on an H200."""

NOISE = 1.5
"""How many times another backend's error ours may have at half precision, where both round. On an H200 ours was 0.27 to
0.33 and FLASH_ATTN's 0.30 (bfloat16)."""

Answers = list[list[list[Any]]]
"""For each request, `[token, [[token, log-probability], …]]` by place."""


class Verdict(NamedTuple):
    """How answers compare with the right ones."""

    equal: int  # of the requests
    error: float
    gap: float  # largest log-probability by which a wrongly chosen token is below the right one
    strange: str  # the first chosen token that is not among the most likely there, and its place; empty: none


def prompts() -> list[list[int]]:
    """Token ids of the requests; the last two begin like the one before them."""
    numbers = random.Random(0)
    made = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in (3, 16, 17, 300, 1500)]
    return [*made, [*made[-1][:1024], 7, 8, 9], made[-1][:640]]


def write_model(folder: Path, dtype: str) -> None:
    """Write a random Llama whose next tokens are not all alike."""
    import torch  # noqa: PLC0415  (seconds to import; the parent process needs neither)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")):
                weight.mul_(6.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def right_answers(folder: Path) -> Answers:
    """A model's greedy answers, by transformers in float32 on the CPU."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: Answers = []
    with torch.inference_mode():
        for prompt in prompts():
            tokens, cache, places = torch.tensor([prompt]), None, []
            for _ in range(NEW_TOKENS):
                output = model(tokens, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                best = output.logits[0, -1].log_softmax(dim=-1).topk(SHOWN)
                likely = [list(pair) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
                places.append([likely[0][0], likely])
                tokens = best.indices[:1, None]
            answers.append(places)
    return answers


def compare(right: Answers, answers: Answers) -> Verdict:
    """How far answers are from the right ones; nothing after a request's first different token is compared."""
    equal, error, gap, strange = 0, 0.0, 0.0, ""
    for request, (wanted, given) in enumerate(zip(right, answers, strict=True)):
        equal += [place[0] for place in wanted] == [place[0] for place in given]
        for number, ((token, likely), (other, shown)) in enumerate(zip(wanted, given, strict=True)):
            log_probabilities, theirs = dict(map(tuple, likely)), dict(map(tuple, shown))
            both = log_probabilities.keys() & theirs.keys()
            error = max([error, *(abs(log_probabilities[one] - theirs[one]) for one in both)])
            if other not in log_probabilities:
                strange = (
                    strange or f"request {request}, place {number}: token {other} is none of the {SHOWN} most likely"
                )
            if other != token:
                gap = max(gap, log_probabilities[token] - log_probabilities.get(other, -math.inf))
                break
    return Verdict(equal, error, gap, strange)


def most_error(dtype: str, baseline: Verdict) -> float:
    """The largest error, and the largest gap, that is allowed."""
    return EXACT if dtype == "float32" else NOISE * baseline.error
