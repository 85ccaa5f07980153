"""Server-sent events, put together from the pieces in which they come over the wire."""

from vllm_hybrid_sparse.errors import HybridSparseError
from vllm_hybrid_sparse.load.server_text import error_in_body, shortened

_ERRORS = (b"event: error", b"event:error")
_MOST_BYTES = 2**24  # of one event; an event that the server never ends must not fill the memory


class StreamError(HybridSparseError, RuntimeError):
    """A stream that is not as it should be; the text is the reason that the record keeps."""


class EventDecoder:
    """Joins pieces of a stream into events and returns the data of each.

    Lines end with LF or CR LF. Comments (pings) and the fields id and retry are skipped, and so is the field event
    unless it is `error`. Text is decoded when an event is whole, so a piece may end inside a character.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._failed = False  # whether the event is an error
        self._comment = b""  # the event's last one

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of all events that `piece` completes, in order; empty if it completes none.

        Raises StreamError for an event that is not UTF-8 or too long, and for one that is an error. Some servers say
        what the error is in its data, others in a comment.
        """
        events = []
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._line += end
            line = bytes(self._line).removesuffix(b"\r")
            self._line.clear()
            self._data += _data_of(line)
            if line:
                self._failed = self._failed or line in _ERRORS
                self._comment = line[1:] if line.startswith(b":") else self._comment
                continue
            if self._failed:
                raise StreamError(f"the server reports: {self._error()}")
            if self._data:
                events.append(self._text())
            self._comment = b""
        self._line += rest
        if len(self._line) + sum(map(len, self._data)) > _MOST_BYTES:
            raise StreamError(f"an event is longer than {_MOST_BYTES} bytes")
        return events

    @property
    def unfinished(self) -> bool:
        """Whether the stream stands inside an event."""
        return bool(self._line or self._data)

    @property
    def rest(self) -> bytes:
        """The data of the unfinished event, as far as it has come."""
        return b"\n".join([*self._data, *_data_of(bytes(self._line).removesuffix(b"\r"))])

    def _error(self) -> str:
        said = (b"\n".join(self._data) or self._comment).decode(errors="replace")
        return error_in_body(said) or shortened(said) or "an error"

    def _text(self) -> str:
        data = b"\n".join(self._data)
        self._data.clear()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise StreamError(f"an event is not UTF-8: {data[:80]!r}") from error


def _data_of(line: bytes) -> list[bytes]:
    """Return the data that a line holds; none if it is a comment, another field or blank."""
    return [line[5:].removeprefix(b" ")] if line.startswith(b"data:") else []
