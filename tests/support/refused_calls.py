"""System calls refused by the kernel, as on file systems without them."""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Final

__all__ = ["refuse"]

_NUMBERS: Final = {"flock": {"x86_64": 73, "aarch64": 32}, "renameat2": {"x86_64": 316, "aarch64": 276}}
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def refuse(call: str, number: int) -> None:
    """Make ``call`` fail with this errno in this process and its children from now on (by seccomp)."""
    steps = (
        (0x20, 0, 0, 0),  # the number of the system call
        (0x15, 0, 1, _NUMBERS[call][platform.machine()]),  # compare with the call to refuse
        (0x06, 0, 0, 0x00050000 | number),  # return the error
        (0x06, 0, 0, 0x7FFF0000),  # allowed
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in steps))
    program, libc = _Program(len(steps), ctypes.addressof(code)), ctypes.CDLL(None)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0
