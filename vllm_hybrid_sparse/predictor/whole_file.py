"""Files that are there as a whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; what is there takes its place when the block ends without an error."""
    scratch = path.with_name(f".{path.name}.partial")
    yield scratch
    scratch.replace(path)
