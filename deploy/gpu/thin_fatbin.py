"""Leave in a shared library only the GPU code that one GPU needs, so that it packs small.

    python deploy/gpu/thin_fatbin.py IN.so OUT.so [SM]      SM: 90 by default

Of every CUDA fatbin container in IN.so what stays is the machine code of sm_SM (sm_SMa too), or, where there is none,
the newest PTX that the GPU can compile. The bytes of the rest are zeroed: the file keeps its size and its layout.
Prints how many bytes of which kind were kept and dropped.
"""

import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTAINER_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2


class Image(NamedTuple):
    """The code for one GPU in a container."""

    kind: int  # PTX or MACHINE_CODE
    arch: int
    content: bytes  # with its header


def fatbin_sections(library: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of the ELF sections that hold containers."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, entries, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, table + i * entry_bytes) for i in range(entries)]
    names = headers[names_index][4]
    for header in headers:
        start = names + header[0]
        if library[start : library.index(b"\0", start)] == b".nv_fatbin":
            yield header[4], header[4] + header[5]


def images_between(library: bytes, start: int, end: int) -> list[Image]:
    """All images of a container whose header has been read. Raises ValueError where it is not laid out as known."""
    images = []
    while start < end:
        kind, _, header_bytes, content_bytes = struct.unpack_from("<HHIQ", library, start)
        (arch,) = struct.unpack_from("<I", library, start + 0x1C)
        if kind not in (PTX, MACHINE_CODE) or not 64 <= header_bytes <= 4096 or not 50 <= arch <= 130:
            raise ValueError(f"image at {start:#x}: kind={kind}, arch={arch}: not a layout that this program knows")
        images.append(Image(kind, arch, library[start : start + header_bytes + content_bytes]))
        start += header_bytes + content_bytes
    if start != end:
        raise ValueError(f"container that ends at {end:#x}: its images end at {start:#x}")
    return images


def images_to_keep(images: list[Image], sm: int) -> list[Image]:
    """What the GPU runs; the smallest image where it could run none before either: a container is never empty."""
    code = [image for image in images if image.kind == MACHINE_CODE and image.arch == sm]
    ptx = [image for image in images if image.kind == PTX and image.arch <= sm]
    if code:
        return code
    return [max(ptx, key=lambda image: image.arch)] if ptx else [min(images, key=lambda image: len(image.content))]


def thin(library: bytearray, sm: int) -> Counter[str]:
    """Thin a library in place; returns bytes by what was done with them, and the number of containers."""
    counts: Counter[str] = Counter()
    for section_start, section_end in fatbin_sections(bytes(library)):
        at = section_start
        while at + 16 <= section_end:
            magic, _, header_bytes, content_bytes = struct.unpack_from("<IHHQ", library, at)
            if magic != CONTAINER_MAGIC:
                at += 8
                continue
            start, end = at + header_bytes, at + header_bytes + content_bytes
            images = images_between(bytes(library), start, end)
            kept = images_to_keep(images, sm)
            for image in images:
                fate, kind = "kept" if image in kept else "dropped", "ptx" if image.kind == PTX else "code"
                counts[f"{fate} {kind} sm_{image.arch}"] += len(image.content)
            counts["containers"] += 1
            body = b"".join(image.content for image in kept)
            struct.pack_into("<Q", library, at + 8, len(body))
            library[start:end] = body + bytes(content_bytes - len(body))
            at = (end + 7) & ~7
    return counts


def main(arguments: list[str]) -> int:
    """Thin IN.so into OUT.so."""
    library = bytearray(Path(arguments[0]).read_bytes())
    counts = thin(library, int(arguments[2]) if len(arguments) > 2 else 90)
    Path(arguments[1]).write_bytes(library)
    for name in sorted(counts):
        print(name, counts[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
