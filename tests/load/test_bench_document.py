"""The example in docs/BENCH.md runs as it stands there, on a small server."""

import re
from pathlib import Path

import pytest

from tests.load.fake_server import serving

DOCUMENT = Path(__file__).parents[2] / "docs" / "BENCH.md"
URL = "http://127.0.0.1:8000"


def test_the_example_of_the_harness_from_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert URL in code
    with serving() as server:
        exec(compile(code.replace(URL, server.url), str(DOCUMENT), "exec"), {"__name__": "example"})
    assert "{'ok': 8} 0." in capsys.readouterr().out
