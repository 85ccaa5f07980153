"""Keeps CPython from mapping and unmapping memory at every call.

CPython (3.11 and newer) puts the frames of Python functions into chunks of 16 KiB. One is mapped when a call finds the
one before it full, and unmapped when that call returns. Code that calls from just below the end of a chunk therefore
maps and unmaps one for every call, and where other threads run, each unmapping interrupts their cores to have them
forget the pages. Whether it happens depends on the depth of the stack alone. A chunk is doubled until the frame that it
is for fits; so one frame of a little more than half a chunk leaves the rest to all calls from it.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_FRAME_BYTES = 128 * 1024
_SLOT_BYTES = 8

P = ParamSpec("P")
R = TypeVar("R")


def with_frame_room(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called so that all frames below it lie in one chunk, up to about 124 KiB of them.

    The chunk is mapped once a call, and only the parts of it that frames have used take memory.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    # The largest stack of values that the code is said to need; it needs a few.
    call.__code__ = call.__code__.replace(co_stacksize=_FRAME_BYTES // _SLOT_BYTES)
    return functools.wraps(function)(call)
