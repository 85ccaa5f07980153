"""The texts that the shipped predictor for key codes was trained on, cut from WikiText-2 and L-Eval.

    python -m benchmarks.accuracy.predictor_texts DATA --out TEXTS

DATA holds wikitext2-valid.txt and L-Eval's tasks as leval-*.jsonl. The beginnings are left for measuring: the first
32768 tokens of WikiText-2, the first documents of each task. `hybrid-sparse calibrate` makes the predictor from these
files with the command in its metadata.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.accuracy.documents import read_questions
from vllm_hybrid_sparse.cli.smollm2 import model_dir

WIKITEXT = "wikitext2-valid"
WIKITEXT_FIRST_TOKEN = 32768
LEVAL_FIRST_DOCUMENT = {
    "leval-gov_report_summ": 7,
    "leval-legal_contract_qa": 12,
    "leval-financial_qa": 4,
    "leval-multidoc_qa": 10,
}
DOCUMENT_CHARACTERS = 45_000
FILE_CHARACTERS = 160_000


def later_documents(path: Path, first: int) -> str:
    """The documents from number `first` on, each once, cut to the part that is trained on."""
    documents = list(dict.fromkeys(question.document for question in read_questions(path)))
    return "\n\n".join(document[:DOCUMENT_CHARACTERS] for document in documents[first:])[:FILE_CHARACTERS]


def text_from_token(text: str, first: int, tokenizer: Tokenizer) -> str:
    """The text after its first `first` tokens."""
    return text[tokenizer.encode(text, add_special_tokens=False).offsets[first][0] :]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    options.out.mkdir(parents=True, exist_ok=True)
    wikitext = (options.data / f"{WIKITEXT}.txt").read_text(encoding="utf-8")
    texts = {
        f"{WIKITEXT}-from-token-{WIKITEXT_FIRST_TOKEN}": text_from_token(wikitext, WIKITEXT_FIRST_TOKEN, tokenizer),
        **{name: later_documents(options.data / f"{name}.jsonl", at) for name, at in LEVAL_FIRST_DOCUMENT.items()},
    }
    for name, text in texts.items():
        (options.out / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}.txt: {len(text)} characters")


if __name__ == "__main__":
    main()
