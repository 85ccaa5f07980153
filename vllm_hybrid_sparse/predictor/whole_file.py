"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to; that file replaces `path` when the block ends without an error."""
    scratch = path.with_name(f".{path.name}.partial")
    yield scratch
    scratch.replace(path)
