"""Documents point to files that are there."""

import re
from pathlib import Path

import pytest

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
