"""Documents point to files that are there, and the README names every command."""

import argparse
import re
from pathlib import Path

import pytest

from tests.deploy.files import run_tool, tool
from vllm_hybrid_sparse.cli.main import _parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in (".", "docs", "deploy", "deploy/gpu", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link]
    missing = [link for link in links if not (ROOT / document.parent / link).exists()]
    assert not missing, f"{document}: {missing}"


def test_there_are_documents_with_links() -> None:
    assert {Path("README.md"), Path("docs/CHOOSING.md")} <= set(DOCUMENTS)
    assert LINK.findall("[a](docs/A.md) [b](B.md#part) [c](https://c)") == ["docs/A.md", "B.md", "https://c"]


def named_in_readme() -> set[str]:
    """What the first column of the README's table of commands holds."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Commands\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_the_readme_names_every_target_of_make() -> None:
    listed = {line.split()[1] for line in run_tool(tool("make", "make"), "-s", "help").splitlines()} - {"help"}
    assert {"setup", "test"} <= listed
    assert {name.removeprefix("make ") for name in named_in_readme() if name.startswith("make ")} == listed


def test_the_readme_names_every_command_of_the_parser() -> None:
    (commands,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    named = {name.removeprefix("hybrid-sparse ") for name in named_in_readme() if name.startswith("hybrid-sparse ")}
    assert named == set(commands.choices)
