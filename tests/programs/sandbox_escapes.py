"""Ways out of the sandbox. Each is a piece of a program that gets to its end only if it works.

`python sandbox_escapes.py FACTS.json` runs all of them in each confinement, without a package but the standard library,
so that an ordinary user's Python can do it too, and prints those that worked.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

# Given to each: FACTS of the host, call(), which raises if the kernel refuses a system call (numbers of x86_64).
PRELUDE = """
import _thread, ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
FACTS = json.loads(FACTS)
SECRET, DATA, FOLDER, VICTIM = FACTS["secret"], FACTS["data"], FACTS["folder"], FACTS["victim"]
PARENT = os.getppid() or 1
def call(number, *args):
    if os.uname().machine != "x86_64": raise PermissionError("other numbers")
    result = libc.syscall(number, *args)
    if result < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS): raise PermissionError(number)
def must(fact):
    if not fact: raise ValueError("not so")
"""
READING = {
    "an owner-only file": "open(SECRET).read()",
    "the data with the expected outputs": "open(DATA).read()",
    "users": "open('/etc/passwd').read()",
    "passwords": "open('/etc/shadow').read()",
    "the repository": "open(FACTS['repository'] + '/pyproject.toml').read()",
    "a list of the user's files": "must(os.listdir(FOLDER))",
    "a list of temporary files": "must(set(os.listdir(FACTS['temporary'])) - set(os.listdir('.')))",
    "host processes": "must(os.listdir('/proc'))",
    "the environment of process 1": "open('/proc/1/environ').read()",
    "its own memory by /proc": "open('/proc/self/mem', 'rb+')",
    "another process's memory": "open(f'/proc/{VICTIM}/mem', 'rb+')",
    "the supervisor's memory": "open(f'/proc/{PARENT}/mem', 'rb+')",
    "another process's command": "open(f'/proc/{VICTIM}/cmdline').read()",
    "another process's files": "os.listdir(f'/proc/{VICTIM}/fd')",
    "another root": "open(f'/proc/{VICTIM}/root' + SECRET).read()",
    "its own root by /proc": "open('/proc/self/root' + SECRET).read()",
    "mounts": "open('/proc/self/mounts').read()",
    "the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "devices": "must(set(os.listdir('/dev')) - {'null', 'zero', 'random', 'urandom'})",
    "the kernel's objects": "must(os.listdir('/sys'))",
    "control groups": "open('/sys/fs/cgroup/cgroup.procs', 'w')",
    "memory of the machine": "open('/dev/mem', 'rb')",
    "a disk": "open('/dev/vda', 'rb')",
    "a terminal": "open('/dev/tty', 'w')",
    "up to the root": "open('../' * 30 + SECRET).read()",
    "up from an open folder": "os.open('..' + '/..' * 30 + SECRET, os.O_RDONLY, dir_fd=os.open('.', os.O_RDONLY))",
    "a symbolic link": "os.symlink(SECRET, 'link')\nopen('link').read()",
    "a hard link": "os.link(DATA, 'hard')\nopen('hard').read()",
    "a file by its handle": "call(304, -100, b'/', ctypes.create_string_buffer(200), 0, 0)",
    "the environment": "must('SECRET' in ' '.join(os.environ))",
    "files that were open": "must([fd for fd in range(3, 60) if not os.fstat(fd) is None])",
}
WRITING = {
    "a new file of the user": "open(FOLDER + '/new', 'w')",
    "a file of the user": "open(DATA, 'a')",
    "beside its folder": "open('../beside', 'w')",
    "shared memory": "open('/dev/shm/left', 'w')",
    "another temporary folder": "open('/var/tmp/left', 'w')",
    "the root": "open('/left', 'w')",
    "Python's library": "open(os.__file__, 'a')",
    "the sandbox": "open(FACTS['inside'] + '/launcher.py', 'a')",
    "a folder of the user": "os.mkdir(FOLDER + '/sub')",
    "removal": "os.remove(DATA)",
    "another name": "os.rename(DATA, DATA + '.old')",
    "other rights": "os.chmod(FOLDER, 0o777)",
    "another owner": "os.chown(FOLDER, os.getuid(), os.getgid())",
    "another time": "os.utime(DATA)",
    "no content": "os.truncate(DATA, 0)",
    "attributes": "os.setxattr('.', 'user.x', b'x' * 1000)",
    "a link into the user's folder": "os.symlink('/etc', FOLDER + '/link')",
    "its folder swapped for a link": "os.rename(os.getcwd(), os.getcwd() + '2')\nos.symlink(FOLDER, os.getcwd())",
    "a device": "os.mknod('device', 0o20666, os.makedev(1, 1))",
    "a pipe with a name": "os.mkfifo('fifo')",
    "a larger stdin": "os.ftruncate(0, 1 << 30)",
    "another stdin": "os.pwrite(0, b'x', 0)",
}
PROCESSES = {
    "kill of another": "os.kill(VICTIM, 9)",
    "kill of the supervisor": "os.kill(PARENT, 9)",
    "kill of all": "os.kill(-1, 9)",
    "kill of its group": "os.killpg(0, 9)",
    "a signal by a file": "r, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, VICTIM)",
    "a choice of that signal": "fcntl.fcntl(0, 10, 9)",
    "a queued signal": "call(129, VICTIM, 9, None)",
    "ptrace": "call(101, 16, VICTIM, 0, 0)",
    "ptrace of the supervisor": "call(101, 16, PARENT, 0, 0)",
    "reading by process_vm": "call(310, PARENT, None, 0, None, 0, 0)",
    "writing by process_vm": "call(311, PARENT, None, 0, None, 0, 0)",
    "a file of another": "call(434, VICTIM, 0)\ncall(438, 3, 0, 0)",
    "a comparison with another": "call(312, VICTIM, PARENT, 0, 0, 0)",
    "fork": "os.fork() or os._exit(0)",
    "vfork": "call(58)",
    "clone": "call(56, 17, 0, 0, 0, 0)",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "a program": "subprocess.run(['/bin/true'], check=True)",
    "another program in its place": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"escaped\")'])",
    "a program from memory": "call(322, 0, b'', None, None, 0x1000)",
    "a spawned program": "os.posix_spawn('/bin/true', ['true'], {})",
    "a pool of processes": "import multiprocessing\nmultiprocessing.get_context('fork').Pool(1).map(len, ['a'])",
    "another's priority": "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "another's cores": "os.sched_setaffinity(PARENT, {0})",
    "another's limits": "resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1))",
    "a new session": "os.setsid()",
}
PRIVILEGES = {
    "a user namespace": "call(272, 0x10000000)",
    "a mount namespace": "call(272, 0x20000)",
    "a network namespace": "call(272, 0x40000000)",
    "a user namespace by clone": "call(56, 0x10000011, 0, 0, 0, 0)",
    "another's namespace": "call(308, 0, 0)",
    "a mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "a new root mount": "call(442, -100, b'/', 0x8000, ctypes.create_string_buffer(32), 32)",
    "a moved mount": "call(429, -100, b'/', -100, b'/tmp', 0)",
    "an unmount": "call(166, b'/', 2)",
    "another root folder": "os.chroot('.')",
    "a pivot": "call(155, b'.', b'.')",
    "user 0": "os.setuid(0)",
    "group 0": "os.setgid(0)",
    "groups": "os.setgroups([0])",
    "capabilities": "call(126, None, None)",
    "a sight of capabilities": "call(125, ctypes.create_string_buffer(8), None)",
    "capabilities by prctl": "call(157, 47, 2, 21, 0, 0)",
    "life after the parent": "call(157, 1, 0, 0, 0, 0)",
    "a dump": "call(157, 4, 1, 0, 0, 0)",
    "a filter of its own": "call(317, 1, 0, None)",
    "a key": "call(248, b'user', b'x', b'y', 1, -3)",
    "the keyring": "call(250, 0, -3, 1, 0, 0)",
    "bpf": "call(321, 0, ctypes.create_string_buffer(72), 72)",
    "performance counters": "call(298, ctypes.create_string_buffer(112), 0, -1, -1, 0)",
    "userfaultfd": "call(323, 0)",
    "io_uring": "call(425, 1, ctypes.create_string_buffer(120))",
    "a kernel module": "call(175, b'', 0, b'')",
    "another kernel": "call(246, 0, 0, None, 0)",
    "a restart": "call(169, 0, 0, 0, None)",
    "the clock": "call(227, 0, None)",
    "the host's name": "socket.sethostname('x')",
    "swap": "call(167, b'x', 0)",
    "ports": "call(172, 3)",
    "letters typed into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "another personality": "call(135, 0x0040000)",
    "the kernel's log": "call(103, 3, ctypes.create_string_buffer(100), 100)",
    "accounting": "call(163, None)",
    "the numbers of x32": "call(0x40000000 + 39)",
}
NETWORK = {
    "a server of this machine": "socket.create_connection(('127.0.0.1', FACTS['port']), timeout=1)",
    "a server on all addresses": "socket.create_server(('0.0.0.0', 0))",
    "a server on IPv6": "socket.create_server(('::', 0), family=socket.AF_INET6)",
    "a packet": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', FACTS['port']))",
    "a raw packet": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "a Unix socket with a name": "socket.socket(socket.AF_UNIX).connect(FACTS['socket'])",
    "a Unix socket without a file": "socket.socket(socket.AF_UNIX).connect(chr(0) + FACTS['abstract'])",
    "a Unix server": "socket.socket(socket.AF_UNIX).bind('own')",
    "netlink": "socket.socket(16, socket.SOCK_RAW, 0)",
    "the host of a virtual machine": "socket.socket(40, socket.SOCK_STREAM)",
    "Bluetooth": "socket.socket(31, socket.SOCK_RAW, 1)",
    "the kernel's ciphers": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "files sent by a socket": "a, b = socket.socketpair()\nsocket.send_fds(a, [b'x'], [0])",
}
MEMORY_AND_DISK = {
    "a segment of the host": "call(30, FACTS['segment'], 0, 0)",
    "a segment": "call(29, 0, 4096, 0o1600)",
    "a message queue": "call(68, 0, 0o1600)",
    "a semaphore": "call(64, 0, 1, 0o1600)",
    "a POSIX queue": "call(240, b'x', 0o102, 0o600, None)",
    "a file in memory": "os.memfd_create('x')",
    "a secret file in memory": "call(447, 0)",
    "memory past the limit": "bytearray(1 << 30)",
    "shared memory past the limit": "mmap.mmap(-1, 1 << 30)",
    "a higher limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "locked memory": "call(149, 0, 4096)",
    "large pipes": "r, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20)",
    "many threads": (
        "stop = _thread.allocate_lock()\n_thread.stack_size(65536)\n"  # Thread.start() waits for ever for a thread
        "def wait():\n    with stop: pass\n"  # that finds no memory
        "with stop:\n    for _ in range(500): _thread.start_new_thread(wait, ())"
    ),
    "disk past the limit": "for number in range(10):\n    open(f'big{number}', 'wb').write(bytes(4 << 20))",
    "one file past the limit": "open('one', 'wb').truncate(1 << 30)",
    "many files": "for number in range(10000): open(f'f{number}', 'w').close()",
    "many files open": (
        "files = []\ntry:\n    while len(files) < 200: files += os.pipe()\nfinally: [os.close(f) for f in files]"
    ),
    "a quota": "call(179, 0, None, 0, None)",
    "a hole for others": "call(285, 0, 0, 0, 1 << 30)",
}
ALL = {
    f"{kind}: {name}": code
    for kind, table in {
        "reading": READING,
        "writing": WRITING,
        "processes": PROCESSES,
        "privileges": PRIVILEGES,
        "network": NETWORK,
        "memory and disk": MEMORY_AND_DISK,
    }.items()
    for name, code in table.items()
}
ATTEMPTS = """
worked = []
for name, code in ATTEMPTS.items():
    signal.alarm(10)
    try: exec(code, {**globals()})
    except BaseException: continue
    worked.append(name)
signal.alarm(0)
sys.stdout.write(json.dumps(worked))
"""


def program(facts: dict[str, Any], attempts: dict[str, str]) -> str:
    """Returns a program that makes the attempts and prints the names of those that worked."""
    return f"FACTS = {json.dumps(facts)!r}\nATTEMPTS = {attempts!r}\n{PRELUDE}{ATTEMPTS}"


def main() -> None:
    facts = json.loads(sys.argv[1])
    for name in ("lightrl", "lightrl.rewards"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [f"{facts['repository']}/{name.replace('.', '/')}"]
    from lightrl.rewards import sandbox

    found = {}
    for confinement in sandbox.CONFINEMENTS:
        source = program(facts, ALL)
        limits = sandbox.SandboxLimits(timeout_s=60)
        try:
            (run,) = sandbox._supervised(source, limits, confinement, stdins=["stdin"])["runs"]
        except RuntimeError as error:
            found[confinement] = f"refused: {error}"
        else:
            found[confinement] = json.loads(run["stdout"]) if run["exit_code"] == 0 else run
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
