"""Obstacles to probing a machine's kernel, each made for real."""

import pytest

from kprobes.transport.qemu import Machine
from tests.system.conftest import Boot

pytestmark = pytest.mark.guest

_SCRIPT = """
import ctypes, os
from pathlib import Path
from kprobes.host.obstacles import obstacles, words_for

libc = ctypes.CDLL(None, use_errno=True)

def nobody():
    os.setuid(65534)

def powerless():
    # capset(2): version 3, no capability at all.
    libc.capset((ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)())

def read_only():
    # unshare(CLONE_NEWNS); MS_REC | MS_PRIVATE; MS_REMOUNT | MS_BIND | MS_RDONLY.
    assert libc.unshare(0x20000) == 0
    assert libc.mount(None, b"/", None, 0x4000 | 0x40000, None) == 0
    assert libc.mount(None, b"/sys/kernel/tracing", None, 32 | 4096 | 1, None) == 0

def hidden():
    Path("/proc/sys/kernel/kptr_restrict").write_text("2")

for obstacle in (lambda: None, nobody, powerless, read_only, hidden):
    child = os.fork()
    if child == 0:
        obstacle()
        found = obstacles()
        print(obstacle.__name__, [each.subject for each in found], *map(words_for, found[:1]),
              sep=": ", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
Path("/proc/sys/kernel/kptr_restrict").write_text("0")
"""


@pytest.mark.parametrize("any_host_guest", ["bookworm"], ids=["6.1"], indirect=True)
def test_every_obstacle_is_told_with_what_to_do(any_host_guest: Machine) -> None:
    any_host_guest.run(f"cat > /tmp/obstacles.py <<'EOF'\n{_SCRIPT}\nEOF\n")

    ran = any_host_guest.run("python3 /tmp/obstacles.py", 300)

    lines = ran.output.decode().splitlines()
    assert ran.status == 0, lines
    assert lines[0] == "<lambda>: []"
    assert lines[1] == "nobody: ['root']: you are not root (use sudo)"
    assert lines[2].startswith("powerless: ['rights']: root here has no CAP_SYS_ADMIN (")
    assert lines[3].startswith("read_only: ['tracefs']: cannot open kprobe_events of tracefs: ")
    assert "Read-only file system" in lines[3]
    assert lines[4].startswith("hidden: ['symbols']: /proc/kallsyms hides")
    assert "kernel.kptr_restrict=1" in lines[4]


_CONTAINERS = """
import ctypes, os, sys
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
BIND, REC, PRIVATE = 4096, 0x4000, 0x40000
TELL = (
    "from kprobes.host.obstacles import obstacles, words_for;"
    "print(*map(words_for, obstacles()), sep=' | ', flush=True)"
)

def call(name, *arguments):
    assert getattr(libc, name)(*arguments) == 0, (name, os.strerror(ctypes.get_errno()))

def mount(source, target, kind, flags):
    call("mount", source, str(target).encode(), kind, ctypes.c_ulong(flags), None)

def enter(box, marks):
    # A root of its own, with programs and /proc of its processes, but neither /sys nor /dev.
    mount(None, "/", None, REC | PRIVATE)
    box.mkdir(exist_ok=True)
    mount(b"box", box, b"tmpfs", 0)
    for each in sorted(Path("/").iterdir()):
        if each.is_symlink():
            (box / each.name).symlink_to(each.readlink())
        elif each.is_dir() and each.name in ("usr", "lib", "lib64", "bin"):
            (box / each.name).mkdir()
            mount(bytes(each), box / each.name, None, BIND | REC)
    for name in ("proc", "run"):
        (box / name).mkdir()
    mount(b"proc", box / "proc", b"proc", 0)
    for mark in marks:
        (box / mark).touch()
    os.chroot(box)
    os.chdir("/")

def contain(namespaces, marks=(), variables={}, drops=True):
    sys.stdout.flush()
    if (child := os.fork()):
        assert os.waitpid(child, 0)[1] == 0
        return
    call("unshare", namespaces)
    if namespaces & NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text("0 0 1")
        Path("/proc/self/gid_map").write_text("0 0 1")
    if (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    enter(Path("/tmp/box"), marks)
    if drops:
        # PR_CAPBSET_DROP of CAP_SYS_ADMIN: it is lost on exec.
        call("prctl", 24, 21, 0, 0, 0)
    path = {"PATH": "/bin:/usr/bin:/usr/local/bin"}
    os.execve("/usr/local/bin/python3", ["python3", "-c", TELL], path | dict(variables))

OWN = NEWNS | NEWPID
contain(OWN, marks=[".dockerenv"])
contain(OWN, marks=["run/.containerenv"])
contain(OWN, variables={"container": "lxc"})
contain(OWN)
contain(OWN | NEWUSER, marks=[".dockerenv"], drops=False)
contain(OWN, marks=[".dockerenv"], drops=False)
"""
_POWERLESS = (
    "root in this container has no CAP_SYS_ADMIN "
    "(start it on the machine itself, or the container with --privileged)"
)
_ROOTLESS = (
    "root in this container is root of a user namespace only "
    "(use the machine's own root: outside, or in a container that is not rootless)"
)


@pytest.mark.parametrize("any_host_guest", ["bookworm"], ids=["6.1"], indirect=True)
def test_containers_of_every_kind_are_told_as_such(any_host_guest: Machine) -> None:
    any_host_guest.run(f"cat > /tmp/containers.py <<'EOF'\n{_CONTAINERS}\nEOF\n")

    ran = any_host_guest.run("python3 /tmp/containers.py", 300)

    lines = ran.output.decode().splitlines()
    assert ran.status == 0, lines
    assert lines[:4] == [_POWERLESS] * 4
    assert lines[4].split(" | ")[0] == _ROOTLESS
    # One that may do everything mounts tracefs for itself.
    assert lines[5] == ""


def test_a_kernel_that_is_locked_down_says_so(boot_host: Boot) -> None:
    guest = boot_host("bookworm", append="lockdown=confidentiality")
    guest.run("mount -t securityfs none /sys/kernel/security")

    told = guest.run("kprobe doctor --target host", 300)
    tried = guest.run("kprobe trace --target host 'p vfs_read' -- true", 300)

    assert told.status == 5
    assert b"locked down (confidentiality)" in told.output
    assert b"boot without lockdown=confidentiality" in told.output
    assert tried.status == 3
    assert b"this machine's kernel cannot be probed: the kernel is locked down" in tried.output
