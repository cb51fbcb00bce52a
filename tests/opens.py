"""How often the files of a directory are opened, by any process and any library: inotify counts them."""

from __future__ import annotations

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_OPEN, IN_ISDIR = 0x20, 0x40000000
_HEADER = struct.Struct("iIII")


@contextmanager
def counted_opens(directory: Path) -> Iterator[Counter[str]]:
    """Fill a counter by file name; it is complete when the block ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    found: Counter[str] = Counter()
    try:
        watched = libc.inotify_add_watch(descriptor, os.fsencode(directory), IN_OPEN)
        assert watched >= 0, os.strerror(ctypes.get_errno())
        yield found
        while True:
            try:
                events = os.read(descriptor, 2**16)
            except BlockingIOError:
                return
            while events:
                _, mask, _, length = _HEADER.unpack_from(events)
                name = events[_HEADER.size : _HEADER.size + length].rstrip(b"\0")
                events = events[_HEADER.size + length :]
                if not mask & IN_ISDIR:
                    found[os.fsdecode(name)] += 1
    finally:
        os.close(descriptor)
