"""Texts to train on: later documents, cut, each of them once; or a text from some token on."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.accuracy import predictor_texts
from benchmarks.accuracy.predictor_texts import later_documents, text_from_token


def jsonl(path: Path, documents: list[str]) -> Path:
    lines = [json.dumps({"input": document, "instructions": ["?"], "outputs": ["!"]}) for document in documents]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_document_seen_before_the_cut_is_not_trained_on(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "task.jsonl", ["measured", "trained", "measured", "trained", "last"])
    assert later_documents(path, 1) == "trained\n\nlast"


def test_documents_and_files_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "task.jsonl", ["first", "abcdef", "ghijkl", "mnopqr"])
    monkeypatch.setattr(predictor_texts, "DOCUMENT_CHARACTERS", 4)
    monkeypatch.setattr(predictor_texts, "FILE_CHARACTERS", 14)
    assert later_documents(path, 1) == "abcd\n\nghij\n\nmn"


def test_a_text_from_a_token_on() -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    assert text_from_token("one two  three four", 2, tokenizer) == "three four"
