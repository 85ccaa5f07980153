"""Rows of measurements in a JSONL file that a later run continues."""

import json
from collections.abc import Mapping
from pathlib import Path

from vllm_hybrid_sparse.whole_file import whole_file

Row = dict[str, object]


class OtherCommitError(ValueError):
    """The file holds rows that other code has measured."""


class RowFile:
    """Rows by their identity; written as they come, one line each.

    A file holds rows of one commit: OtherCommitError if it holds others, unless `redo` drops those. (While the
    working tree has changes, they all count as one commit: `machine.commit` says `+changes`.) Without a path the rows
    are kept in memory. A last line that was cut off is dropped and measured again.
    """

    def __init__(self, path: Path | None, commit: str, *, redo: bool = False) -> None:
        self._path = path
        self._commit = commit
        self._rows: dict[str, Row] = {}
        if path is None or not path.exists():
            return
        found = read_rows(path)
        others = sorted({str(row.get("commit")) for row in found} - {commit})
        if others and not redo:
            raise OtherCommitError(
                f"{path.name}: holds rows of commit {', '.join(others)}, this is {commit}; name another file, or give "
                "--redo to measure them again"
            )
        for row in found:
            if row.get("commit") == commit:
                self._rows[row_key(row["identity"])] = row
        kept = "".join(json.dumps(row) + "\n" for row in self._rows.values())
        if kept != path.read_text(encoding="utf-8"):  # rows were dropped, or a last line was cut off
            with whole_file(path) as scratch:
                scratch.write_text(kept, encoding="utf-8")

    def get(self, identity: Mapping[str, object]) -> Row | None:
        """The row measured for `identity`, if there is one."""
        return self._rows.get(row_key(identity))

    def add(self, identity: Mapping[str, object], measured: Mapping[str, object]) -> Row:
        """Keep what was measured, and return the whole row."""
        row: Row = {"commit": self._commit, "identity": dict(identity), **measured}
        self._rows[row_key(identity)] = row
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSONL file; a last line that is not JSON was cut off and is left out, any other raises ValueError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path.name}, line {number}: is no JSON") from None
    return rows


def row_key(identity: object) -> str:
    """What two rows of the same measurement have in common."""
    return json.dumps(identity, sort_keys=True)
