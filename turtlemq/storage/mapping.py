"""Memory mappings of files that hold no descriptor.

Before Python 3.13 (`trackfd`) an `mmap` object keeps a duplicate of the descriptor for as long as it lives. Ten thousand tables
would hold ten thousand descriptors. The system call itself needs the descriptor only while it runs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The owner of one mapping: an array over its bytes refers to it, and so does every view of that array."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),  # read only
        }

    def __del__(self, munmap: Any = _LIBC.munmap) -> None:
        munmap(self._address, self._size)


def map_file(fd: int, size: int) -> memoryview:
    """The first `size` bytes of a file, read only. The mapping ends with the last view of it."""
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Mapping(address, size)).data
