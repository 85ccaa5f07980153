"""The traces of the capacity benchmark: what hits the prefix cache, and what cannot."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.serving.capacity_traces import prefill_trace, question_trace, read_texts
from vllm_hybrid_sparse.load.mixes import Lengths

LETTERS = Tokenizer(models.WordLevel({chr(code): code for code in range(32, 127)} | {"\n": 10}, unk_token="~"))
LETTERS.pre_tokenizer = pre_tokenizers.Split("", "isolated")
TEXTS = ["one two three four five six seven eight", "alpha beta gamma delta epsilon zeta eta theta"]
OUTPUT = Lengths.parse("output", "4:1,8:1")


def test_questions_share_whole_documents_and_differ_behind_them() -> None:
    requests = question_trace(TEXTS, LETTERS, 32, 12, OUTPUT, seed=1)
    assert len({request.prompt for request in requests}) == len(requests) == 24
    for number in (1, 2):
        of_one = [request for request in requests if request.group == f"document {number}"]
        assert len(of_one) == 12
        assert len({request.prompt[:32] for request in of_one}) == 1
        assert len({request.prompt[32:] for request in of_one}) == 12
    assert {request.max_tokens for request in requests} == {4, 8}
    assert all(request.ignore_eos for request in requests)
    groups = [request.group for request in requests]
    assert groups != sorted(groups, key=str)
    assert requests == question_trace(TEXTS, LETTERS, 32, 12, OUTPUT, seed=1)


def test_a_text_shorter_than_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="document_tokens=40: text 0 has 39"):
        question_trace(TEXTS, LETTERS, 40, 1, OUTPUT, seed=0)


def test_prompts_for_prefill_begin_differently_and_are_as_long_as_asked() -> None:
    requests = prefill_trace([" ".join(TEXTS)], words=4, count=3, output_tokens=2)
    assert [str(request.prompt) for request in requests] == [
        "Part 1. five six seven eight",
        "Part 2. alpha beta gamma delta",
        "Part 3. epsilon zeta eta theta",
    ]

    with pytest.raises(ValueError, match="words=4: text 0 has too few for 4 prompts"):
        prefill_trace([" ".join(TEXTS)], words=4, count=4, output_tokens=2)


def write_documents(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"input": text, "instructions": ["what?"], "outputs": ["that"]}) for text in documents]
    path.write_text("\n".join(lines))
    return path


def test_the_longest_texts_are_taken_each_once(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["short", "the longest of all", "the middle", "the longest of all"])
    assert read_texts([path], 2, seed=0) == ["the longest of all", "the middle"]
    with pytest.raises(ValueError, match="documents=4: the files have 3"):
        read_texts([path], 4, seed=0)


def test_every_file_gives_its_longest_before_any_gives_its_next(tmp_path: Path) -> None:
    one = write_documents(tmp_path / "one.jsonl", ["the longest of all", "another long one", "both"])
    other = write_documents(tmp_path / "other.jsonl", ["both", "short text"])
    assert read_texts([one, other], 4, seed=0) == ["the longest of all", "short text", "another long one", "both"]


def test_without_files_texts_are_made_up_and_long_enough() -> None:
    made = read_texts([], 2, seed=0)
    assert len(set(made)) == 2
    assert all(len(text.split()) >= 16_000 for text in made)
