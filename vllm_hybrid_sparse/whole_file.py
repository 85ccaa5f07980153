"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to; that file replaces `path` when the block ends without an error.

    With an error it is removed. If `path` is a link, all of this is about the file that it leads to.
    """
    target = path.resolve()
    scratch = target.with_name(f".{target.name}.partial")
    try:
        yield scratch
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
