"""Server-sent events, put together from the pieces in which they come over the wire."""

from vllm_hybrid_sparse.errors import HybridSparseError

_MOST_BYTES = 2**24  # of one event; an event that the server never ends must not fill the memory


class StreamError(HybridSparseError, RuntimeError):
    """A stream that is not as it should be; the text is the reason that the record keeps."""


class EventDecoder:
    """Joins pieces of a stream into events and returns the data of each.

    Lines end with LF or CR LF. Comments (pings) and the fields event, id and retry are skipped. Text is decoded when an
    event is whole, so a piece may end inside a character.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of all events that `piece` completes, in order; empty if it completes none.

        Raises StreamError for an event that is not UTF-8 or too long.
        """
        events = []
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._line += end
            line = bytes(self._line).removesuffix(b"\r")
            self._line.clear()
            self._data += _data_of(line)
            if not line and self._data:
                events.append(self._text())
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
