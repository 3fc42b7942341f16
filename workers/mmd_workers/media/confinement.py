"""Takes everything from a decode process that decoding does not need, layer by layer. Linux only; independent of media.

Two steps: `isolate` before anything is imported or any thread runs, `confine` once everything is loaded. Each layer holds on its own,
so a pod that refuses one (most refuse user namespaces) keeps the others; both functions return which are active.

It calls the kernel's interfaces through ctypes: pyseccomp and the other bindings on PyPI only wrap a libseccomp that must be
installed with them, and neither the images nor `pip install` bring one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NoReturn

Layer = Literal["namespaces", "root", "user", "landlock", "seccomp"]
LAYERS: Mapping[Layer, str] = {
    "namespaces": "own mount, PID, network, IPC and UTS namespaces",
    "root": "an empty, read-only root directory",
    "user": "own user or user namespace, without capabilities",
    "landlock": "no file, TCP port, abstract socket or signal to others (Landlock)",
    "seccomp": "only the system calls that decoding needs",
}
FIRST_USER, USERS = 60_000, 5_000  # free in Debian, and mapped if a container has 65,536 users
NOBODY = 65534
MAX_THREADS = 64  # limit for a decode process that has a user to itself

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 0x4000, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_NO_NEW_PRIVS = 1, 4, 15, 38


def isolate(report: Callable[[int], object]) -> dict[Layer, bool]:
    """Continue in a child with its own namespaces if the kernel and the pod allow it; otherwise continue here.

    `report` is called once with the PID of the continuing process, as the caller's parent sees it. With namespaces the calling
    process never returns: it waits for the child, ends as the child ended, and kills it on SIGTERM.
    """
    user = False
    try:
        if os.geteuid() == 0 and _unshared(_NAMESPACES):
            pass
        elif _unshared(_NAMESPACES | _CLONE_NEWUSER):
            user = True
        else:
            report(os.getpid())
            return {"namespaces": False, "user": False}
    except OSError as error:
        sys.stderr.write(f"the decode process cannot map its user: {error}\n")
        raise SystemExit(1) from error
    ready, go = os.pipe()
    child = os.fork()
    if child != 0:
        os.close(ready)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        report(child)
        os.write(go, b"1")
        os.closerange(3, 1024)  # the control socket must end with the child
        _end_as(child)
    os.close(go)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.read(ready, 1) != b"1":  # the parent ended before this process asked to die with it
        os._exit(1)
    os.close(ready)
    return {"namespaces": True, "user": user}


def _unshared(flags: int) -> bool:
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(flags) != 0:
        return False
    if flags & _CLONE_NEWUSER:
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return True


def _end_as(child: int) -> NoReturn:
    """Wait for the child and end with its exit status or signal."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def confine(isolated: Mapping[Layer, bool]) -> dict[Layer, bool]:
    """Give up files, user, capabilities and system calls for good. Returns each layer and whether it is active.

    Nothing can be imported or opened afterwards. Landlock holds for the calling thread and the threads it starts, so it counts as
    active only if no other thread runs.
    """
    os.environ.clear()
    one_thread = len(os.listdir("/proc/self/task")) == 1
    active: dict[Layer, bool] = {"namespaces": isolated["namespaces"]}
    active["root"] = isolated["namespaces"] and empty_root()
    active["user"] = own_user(in_own_namespace=isolated["user"])
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # no core, and /proc/PID is root's
    active["landlock"] = landlock() and one_thread
    active["seccomp"] = seccomp()
    return {layer: active[layer] for layer in LAYERS}


def empty_root() -> bool:
    """Replace the root directory by an empty, read-only one; needs its own mount namespace."""
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    if _libc.mount(b"none", b"/proc", b"tmpfs", flags, b"size=4k,mode=0555") != 0:
        return False
    try:
        os.chroot("/proc")
        os.chdir("/")
    except OSError:
        return False
    return True


def own_user(*, in_own_namespace: bool) -> bool:
    """Become a user that runs nothing else (root only), or drop the capabilities over the own user namespace."""
    is_own = in_own_namespace
    if os.geteuid() == 0 and not in_own_namespace:
        user_id = FIRST_USER + os.getpid() % USERS
        try:
            os.setgroups([])
            os.setresgid(user_id, user_id, user_id)
            os.setresuid(user_id, user_id, user_id)
        except OSError:
            return False
        is_own = True
    _drop_capabilities()
    if is_own:
        # The limit counts every thread of a user: for a shared user, the threads of all its pods on the node.
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
    return is_own


def _drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _check(_libc.capset(header, bytes(24)))


def landlock() -> bool:
    """Deny every access known to this kernel's Landlock (landlock(7)); needs no_new_privs."""
    create, restrict = 444, 446
    abi = _libc.syscall(create, None, 0, 1)
    if abi < 1:
        return False
    files = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
    attributes = struct.pack("Q", (1 << files) - 1)
    if abi >= 4:
        attributes += struct.pack("Q", 0b11)  # bind and connect TCP
    if abi >= 6:
        attributes += struct.pack("Q", 0b11)  # abstract Unix sockets, signals
    ruleset = _libc.syscall(create, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(restrict, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


# --- seccomp ----------------------------------------------------------------------------------------------------------
# Numbers of x86_64 and aarch64; None where an architecture has no such call.

_ALLOWED: Mapping[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "fstat": (5, 80), "munmap": (11, 215),
    "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "sched_yield": (24, 124),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "getpid": (39, 172), "gettid": (186, 178), "getrusage": (98, 165), "times": (100, 153),
    "sysinfo": (99, 179), "poll": (7, None), "ppoll": (271, 73), "recvmsg": (47, 212), "futex": (202, 98),
    "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283), "sched_getaffinity": (204, 123),
    "getrandom": (318, 278), "dup2": (33, None), "dup3": (292, 24), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_CONDITIONAL: Mapping[str, tuple[int, int]] = {
    "mmap": (9, 222), "mprotect": (10, 226), "clone": (56, 220), "clone3": (435, 435), "fcntl": (72, 25),
    "newfstatat": (262, 79), "prlimit64": (302, 261), "prctl": (157, 167), "sendto": (44, 206), "tgkill": (234, 131),
}  # fmt: skip
_FATAL: Mapping[str, tuple[int | None, int | None]] = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "socket": (41, 198), "connect": (42, 203),
    "bind": (49, 200), "kill": (62, 129), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "bpf": (321, 280),
    "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "init_module": (175, 105), "finit_module": (313, 273),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # clone of pthread_create: glibc, musl
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_AT_EMPTY_PATH = 0x1000
_PROT_EXEC = 4


def seccomp() -> bool:
    """Allow the calls that decoding needs, kill the process at calls that only an attack needs, refuse all others with EPERM.

    Holds for all threads; needs no_new_privs. False on kernels and processors without it.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return False
    code = b"".join(_filter(*architecture, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    number = (317, 277)[architecture[0]]
    return bool(_libc.syscall(number, _SET_MODE_FILTER, _FLAG_TSYNC, program) == 0)


def _filter(column: int, architecture: int, pid: int) -> Iterator[bytes]:
    """The BPF program, instruction by instruction (struct sock_filter). Each rule begins with the call's number loaded."""

    def op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    refuse = 0x00050000 | errno.EPERM
    yield op(_LOAD, 4)
    yield op(_EQUAL, architecture, 1, 0)
    yield op(_RETURN, _KILL_PROCESS)
    yield op(_LOAD, 0)
    for numbers, verdict in ((_ALLOWED, _ALLOW), (_FATAL, _KILL_PROCESS)):
        for pair in numbers.values():
            if (number := pair[column]) is not None:
                yield op(_EQUAL, number, 0, 1)
                yield op(_RETURN, verdict)

    def only(name: str, argument: int, values: tuple[int, ...], otherwise: int) -> Iterator[bytes]:
        """Allow a call if its argument has one of these values in its lower 32 bits, all that these calls read."""
        yield op(_EQUAL, _CONDITIONAL[name][column], 0, 2 * len(values) + 2)
        yield op(_LOAD, 16 + 8 * argument)
        for value in values:
            yield op(_EQUAL, value, 0, 1)
            yield op(_RETURN, _ALLOW)
        yield op(_RETURN, otherwise)

    yield from only("clone", 0, _THREAD_FLAGS, _KILL_PROCESS)
    yield from only("fcntl", 1, (1, 2, 3, 4, 1030), refuse)  # GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC
    yield from only("newfstatat", 3, (_AT_EMPTY_PATH,), refuse)  # fstat, as glibc calls it
    yield from only("prlimit64", 0, (0,), _KILL_PROCESS)
    yield from only("prctl", 0, (_PR_SET_NAME,), refuse)
    yield from only("sendto", 4, (0,), _KILL_PROCESS)  # to the connected peer, nowhere else
    yield from only("tgkill", 0, (pid,), _KILL_PROCESS)  # abort() and nothing else
    for name in ("mmap", "mprotect"):  # neither may add executable code
        yield op(_EQUAL, _CONDITIONAL[name][column], 0, 4)
        yield op(_LOAD, 16 + 8 * 2)
        yield op(_ANY_BIT, _PROT_EXEC, 0, 1)
        yield op(_RETURN, _KILL_PROCESS)
        yield op(_RETURN, _ALLOW)
    yield op(_EQUAL, _CONDITIONAL["clone3"][column], 0, 1)
    yield op(_RETURN, 0x00050000 | errno.ENOSYS)  # its flags are behind a pointer; libc falls back to clone
    yield op(_RETURN, refuse)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
