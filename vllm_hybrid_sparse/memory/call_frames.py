"""Keeps CPython from mapping and unmapping memory at every call.

CPython (3.11 and newer) puts the frames of Python functions into chunks of 16 KiB. A chunk is mapped when a call finds
the last one full, and unmapped when that call returns. Code that calls from just below the end of a chunk therefore
maps and unmaps one at every call. If other threads run, each unmapping also interrupts their cores to make them forget
the pages. Whether this happens depends only on the depth of the stack. A new chunk is doubled until the frame that it
is for fits. So one frame of a little more than half a chunk leaves the rest to all calls below it.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_FRAME_BYTES = 128 * 1024
_SLOT_BYTES = 8

P = ParamSpec("P")
R = TypeVar("R")


def with_frame_room(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that all frames below it lie in one chunk, up to about 124 KiB of them.

    Each call maps the chunk once, and only the parts of it that frames have used take memory.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # The stack of values that the code claims to need; it really needs a few slots.
    call.__code__ = call.__code__.replace(co_stacksize=_FRAME_BYTES // _SLOT_BYTES)
    return functools.wraps(function)(call)
