"""The system calls that a sandboxed process may make, as a seccomp filter. All others fail with EPERM.

A program is a single process: it may start threads, but no other process. A memory limit per process is therefore
enough, and nothing is left when it ends. The numbers are those of the kernel's tables
(arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h), which never change.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_NAMES_X86_64_AARCH64 = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57,
fstat 5 80, newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, flock 73 32, fadvise64 221 223, umask 95 166,
fsync 74 82, fdatasync 75 83, sendfile 40 71, statfs 137 43, fstatfs 138 44,
mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214,
futex 202 98, set_robust_list 273 99, rseq 334 293, set_tid_address 218 96, sched_yield 24 124,
sched_getaffinity 204 123, membarrier 324 283, gettid 186 178, getpid 39 172, getppid 110 173, arch_prctl 158 -,
restart_syscall 219 128, exit 60 93, exit_group 231 94, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigtimedwait 128 137, rt_sigpending 127 136, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -,
setitimer 38 103, getitimer 36 102, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163,
sysinfo 99 179, uname 63 160, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getgroups 115 158, getresuid 118 148,
getresgid 120 150, getpgrp 111 -, getpgid 121 155, getsid 124 156, getrandom 318 278, wait4 61 260,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, sendto 44 206, recvfrom 45 207, shutdown 48 210
"""
_CHANGING_FILES_X86_64_AARCH64 = """
mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45, ftruncate 77 46, chmod 90 -,
fchmod 91 52, fchmodat 268 53, utimensat 280 88, open 2 -, openat 257 56
"""
_READING_FILES = {"open": (2, -1, 1), "openat": (257, 56, 2)}  # (x86_64, aarch64, argument with the flags)
_WRITING = 0o20001103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
_THREAD = 0x10000  # CLONE_THREAD
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # not F_SETOWN and F_SETSIG, which send signals to others
_CHECKED = {  # (x86_64, aarch64, argument, its allowed values)
    "ioctl": (16, 29, 1, _IOCTLS),
    "fcntl": (72, 25, 1, _FCNTLS),
    "prctl": (157, 167, 0, (15, 16)),  # a thread's name
    "prlimit64": (302, 261, 0, (0,)),  # the process's own limits; it cannot raise a hard limit
    "socketpair": (53, 199, 0, (1,)),  # connected to itself, which asyncio needs
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_ALLOW, _DENY, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def restrict_system_calls(*, may_change_files: bool) -> None:
    """Denies all other system calls to this process for good; raises OSError if the kernel does not support this."""
    code = filter_code(os.uname().machine, may_change_files=may_change_files)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Filter(len(code) // 8, code)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


def filter_code(machine: str, *, may_change_files: bool) -> bytes:
    """Returns the filter as instructions of classic BPF, 8 bytes each."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no seccomp filter for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    code = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_IF_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _DENY)]  # the numbers of x32 on x86_64
    for number in _numbers(_NAMES_X86_64_AARCH64, column):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code += [(_IF_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _UNKNOWN)]  # libc then uses clone
    code += _if_number(_CLONE[column], _argument(0), [(_IF_ANY_BIT, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW)])
    for *numbers, argument, values in _CHECKED.values():
        tests = [part for value in values for part in ((_IF_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
        code += _if_number(numbers[column], _argument(argument), tests)
    if may_change_files:
        for number in _numbers(_CHANGING_FILES_X86_64_AARCH64, column):
            code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    else:
        for *numbers, argument in _READING_FILES.values():
            tests = [(_IF_ANY_BIT, 1, 0, _WRITING), (_RETURN, 0, 0, _ALLOW)]
            code += _if_number(numbers[column], _argument(argument), tests)
    code.append((_RETURN, 0, 0, _DENY))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _numbers(table: str, column: int) -> list[int]:
    rows = [row.split() for row in table.replace("\n", " ").split(",")]
    return [int(row[1 + column]) for row in rows if row[1 + column] != "-"]


def _argument(index: int) -> tuple[int, int, int, int]:
    return _LOAD, 0, 0, 16 + 8 * index  # the lower half of the argument, which holds a whole int


def _if_number(
    number: int, load: tuple[int, int, int, int], tests: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    if number < 0:
        return []
    body = [load, *tests, (_RETURN, 0, 0, _DENY)]
    return [(_IF_EQUAL, 0, len(body), number), *body]
