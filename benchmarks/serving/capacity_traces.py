"""The two traces of `benchmarks.serving.capacity`: questions over long documents, and prompts never seen before."""

import random
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.accuracy.documents import read_questions
from vllm_hybrid_sparse.cli.bench import write_prose
from vllm_hybrid_sparse.load.mixes import QUESTIONS, Lengths, cut_to_words
from vllm_hybrid_sparse.load.requests import Request


def read_texts(paths: Sequence[Path], count: int, seed: int) -> list[str]:
    """Return `count` texts of L-Eval's JSONL files, each once: the longest of each file, then the next of each.

    Made-up prose if no file is given.
    """
    if not paths:
        return [write_prose(16_000, seed + number) for number in range(count)]
    files = [
        sorted({question.document for question in read_questions(path)}, key=lambda text: (-len(text), text))
        for path in paths
    ]
    in_turns = [text for turn in zip_longest(*files) for text in turn if text is not None]
    texts = list(dict.fromkeys(in_turns))[:count]
    if len(texts) < count:
        raise ValueError(f"documents={count}: the files have {len(texts)}")
    return texts


def question_trace(
    texts: Sequence[str], tokenizer: Tokenizer, document_tokens: int, each: int, output: Lengths, seed: int
) -> list[Request]:
    """Return `each` questions about every text, as token ids, in an order drawn from `seed`.

    Documents are cut to `document_tokens`, which are whole blocks of the prefix cache, so a question about a document
    that was read before computes only its own tokens. ValueError for a text that is shorter.
    """
    rng = random.Random(seed)
    requests = []
    for number, text in enumerate(texts):
        document = tokenizer.encode(text, add_special_tokens=False).ids[:document_tokens]
        if len(document) < document_tokens:
            raise ValueError(f"document_tokens={document_tokens}: text {number} has {len(document)}")
        for asked in range(each):
            turn, which = divmod(asked + number, len(QUESTIONS))
            question = f"\n\nQuestion {turn + 1}: {QUESTIONS[which]}\nAnswer:"
            prompt = (*document, *tokenizer.encode(question, add_special_tokens=False).ids)
            requests.append(
                Request(prompt=prompt, max_tokens=output.draw(rng), ignore_eos=True, group=f"document {number + 1}")
            )
    rng.shuffle(requests)
    return requests


def prefill_trace(texts: Sequence[str], words: int, count: int, output_tokens: int) -> list[Request]:
    """Return `count` prompts of `words` words, no two of which begin alike, with short answers: a prefill each.

    ValueError if the texts do not have that many words.
    """
    requests = []
    for number in range(count):
        turn, which = divmod(number, len(texts))
        parts = texts[which].split(maxsplit=(turn + 1) * words)  # another part of the text in each turn
        if len(parts) <= (turn + 1) * words or len(parts[-1].split()) < words:
            raise ValueError(f"words={words}: text {which} has too few for {count} prompts")
        text = f"Part {number + 1}. {cut_to_words(parts[-1], words)}"
        requests.append(Request(prompt=text, max_tokens=output_tokens, ignore_eos=True))
    return requests
