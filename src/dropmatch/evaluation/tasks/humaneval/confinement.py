"""Takes from a process, for good, all that a program under judgement has no business with.

A seccomp filter lists the system calls that a computation needs; the kernel refuses all others. Unlike namespaces
it needs neither root nor a kernel setting, and works in containers, which mostly forbid namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys

# Numbers: x86-64, then 64-bit Arm, which lacks some older calls.
_COMPUTING: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "readv": (19, 65), "writev": (20, 66), "access": (21, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23), "getitimer": (36, 102), "setitimer": (38, 103),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "readlink": (89, None), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "exit_group": (231, 94), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "set_robust_list": (273, 99), "getrandom": (318, 278),
    "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
# These return at once, as if done: a program that waits then computes, and so runs into the limits on computing,
# which unlike a clock do not depend on what else the machine does.
_WAITING: dict[str, tuple[int | None, int | None]] = {
    "nanosleep": (35, 101), "futex": (202, 98), "clock_nanosleep": (230, 115),
}  # fmt: skip
_OPEN, _OPENAT, _IOCTL, _FCNTL, _TGKILL, _PRLIMIT = (2, None), (257, 56), (16, 29), (72, 25), (234, 131), (302, 261)
_SECCOMP = (317, 277)

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_TCGETS, _FIOCLEX = 0x5401, 0x5451  # what opening a file in Python asks
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
_NO_NEW_PRIVILEGES, _PARENT_DEATH = 38, 1
_SET_FILTER, _ALL_THREADS = 1, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def limit(seconds: float, memory: int, file_size: int) -> None:
    """Limit what this process may use; it ends with its parent, and is the first to go where memory runs out.

    Args:
        seconds: of computing, in all.
        memory: bytes of address space.
        file_size: bytes of any one file.
    """
    whole = int(seconds) + 1
    _limit(resource.RLIMIT_CPU, whole, whole + 1)
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_FSIZE, file_size)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NPROC, 0)  # of no effect on root, whom only the filter keeps from forking
    _limit(resource.RLIMIT_STACK, 128 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    values = [soft if value is None else value for value in (soft, hard)]
    if ceiling != resource.RLIM_INFINITY:
        values = [ceiling if value == resource.RLIM_INFINITY else min(value, ceiling) for value in values]
    with contextlib.suppress(ValueError, OSError):  # macOS has some of the limits in name only
        resource.setrlimit(kind, (values[0], values[1]))


def confine() -> bool:
    """From here on this process computes, reads files and writes to files that are open, and nothing else.

    It opens no file for writing, makes, renames or removes none, starts no process or thread, opens no connection,
    signals no other process, changes no limit, and cannot wait. There is no way back.

    Returns:
        Whether the kernel agreed.
    """
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    column, machine = _MACHINES[platform.machine()]
    code = _filter(column, machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    number = ctypes.c_long(_SECCOMP[column])
    return bool(libc.syscall(number, _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0)


def _filter(column: int, machine: int) -> bytes:
    """Instructions for the kernel: each call's answer in turn, and last that there is no such call."""
    lines = [_line(_LOAD, _MACHINE), _line(_EQUAL, machine, 1, 0), _line(_RETURN, _KILL), _line(_LOAD, _NUMBER)]

    def answer(call: tuple[int | None, int | None], *block: bytes) -> None:
        number = call[column]
        if number is not None:
            lines.extend([_line(_EQUAL, number, 0, len(block)), *block])

    allow, refuse = _line(_RETURN, _ALLOW), _line(_RETURN, _ERROR | errno.EPERM)
    for call in _COMPUTING.values():
        answer(call, allow)
    for call in _WAITING.values():
        answer(call, _line(_RETURN, _ERROR))
    for call, position in ((_OPEN, 1), (_OPENAT, 2)):
        answer(call, _line(_LOAD, _word(position)), _line(_ANY_BIT, _WRITES, 0, 1), refuse, allow)
    answer(_IOCTL, *_only(_word(1), _TCGETS, _FIOCLEX), allow)
    answer(_FCNTL, *_only(_word(1), _F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC), allow)
    answer(_TGKILL, *_only(_word(0), os.getpid()), allow)  # abort() signals itself
    answer(_PRLIMIT, *_only(_word(2), 0), *_only(_word(2) + 4, 0), allow)  # no new limits, so a question
    return b"".join([*lines, _line(_RETURN, _ERROR | errno.ENOSYS)])


def _only(offset: int, *values: int) -> list[bytes]:
    """Refuses all but these values of a word."""
    tests = [_line(_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    return [_line(_LOAD, offset), *tests, _line(_RETURN, _ERROR | errno.EPERM)]


def _word(argument: int) -> int:
    """Where the lower half of an argument stands."""
    return _ARGUMENTS + 8 * argument


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
