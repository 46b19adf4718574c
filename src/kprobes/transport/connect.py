"""``--target`` as text to a connected stub, which a monitor starts for us where there is none.

Whether a QEMU runs its guest is read from its process's memory, as connecting would stop it. QEMU
keeps it in one variable, a RunState of qapi/run-state.json. ``runstate_is_running`` compares
that one, and is exported to QEMU's modules, also where everything else is stripped.

    Elf64_Sym: u32 name, u8 info, u8 other, u16 shndx, u64 value, u64 size
"""

import contextlib
import mmap
import os
import re
import secrets
import shutil
import socket
import struct
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from kprobes.arch.machine import Machine
from kprobes.arch.registry import machine_of_elf
from kprobes.errors import FormatError, KprobesError, TargetError, UnreachableError, UsageError
from kprobes.formats.elf import MAGIC
from kprobes.transport.address import (
    LIBVIRT,
    dial,
    is_domain,
    is_path,
    listener_pid,
    parse_host_port,
    peer_uid,
)
from kprobes.transport.connection import handshake
from kprobes.transport.monitor import Monitor, is_monitor, leave
from kprobes.transport.running import domain_pid, is_named, named_address
from kprobes.transport.stub import Stub

_RUNNING, _STATES = 9, 16
_FUNCTION = b"\0runstate_is_running\0"
_SIZE = 16
_DYN, _DYNSYM = 3, 11
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = np.dtype([("name", "<u4"), ("other", "<u4"), ("value", "<u8"), ("size", "<u8")])


def runs(pid: int) -> bool | None:
    """Return whether the guest of a QEMU process runs.

    None where nothing tells: a QEMU of another user, or without symbols.
    """
    try:
        state = _read_state(Path("/proc", str(pid)))
    except (OSError, ValueError, struct.error, FormatError, TargetError):
        return None
    return None if state >= _STATES else state == _RUNNING


def _read_state(process: Path) -> int:
    with (
        (process / "exe").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as program,
    ):
        machine, function = find_function(program)
    # A position-independent program lies below its libraries.
    base = int((process / "maps").read_text().split("-", 1)[0], 16)
    with (process / "mem").open("rb", buffering=0) as memory:
        memory.seek(base + function)
        named = machine.text.references(memory.read(_SIZE), base + function)
        place = next(iter(named), None)
        if place is None:
            raise FormatError("a function that names no variable")
        memory.seek(place)
        return int.from_bytes(memory.read(4), "little")


def find_function(program: mmap.mmap) -> tuple[Machine, int]:
    """Return the machine of QEMU, and where its function is that says whether the guest runs.

    Raises:
        FormatError: the program is not QEMU, or exports nothing.
    """
    _, kind, machine, _, _, _, table, _, _, _, _, _, count, _ = _HEADER.unpack_from(program)
    if program[: len(MAGIC)] != MAGIC or kind != _DYN:
        raise FormatError("no position-independent program")
    sections: list[tuple[int, ...]] = [
        _SECTION.unpack_from(program, table + _SECTION.size * i) for i in range(count)
    ]
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind == _DYNSYM and link < count:
            start, length = sections[link][4:6]
            names = program[start : start + length]
            rows = np.frombuffer(program[offset : offset + size], _SYMBOL)
            name = names.find(_FUNCTION)
            found = rows["value"][rows["name"] == name + 1]
            # Without it, 0 would be the name of the first symbol, which is none.
            if name >= 0 and len(found) == 1:
                return machine_of_elf(machine), int(found[0])
    raise FormatError("a program that is not QEMU, or exports nothing")


_PAUSED_S, _STEP_S = 0.5, 0.02
_PREFIX = "qemu:"
_FORMS = "qemu:HOST:PORT, qemu:/path/of.sock, pid:N, name:NAME, vng, libvirt:DOMAIN, running"
_SOCKET = "stub.sock"
_OURS = re.compile(r"/kprobes-\w+/stub\.sock$|/kprobes-[0-9a-f]{16}\.sock$")
"""Sockets of stubs that a monitor has opened for us."""
_CONFINED = (
    "; run kprobe as QEMU's user or as root; where libvirt confines its QEMU (AppArmor, SELinux) "
    "open a port yourself: docs/howto/guests.md, libvirt"
)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_DISCONNECTED = "disconnected:"
_MAX_WORDS = 200
_CHARDEV = re.compile(r"^gdb: filename=(.*)$", re.MULTILINE)
_UNIX = re.compile(r"unix:(.+?)(?:,server(?:=on)?)?$")
_STANDS = re.compile(r"VM status: (?!running|paused\n)")
"""After our connection has stopped a guest that ran it is just paused, and not (prelaunch)."""
_TCP = re.compile(r"(?:tcp|telnet):(\[?.*?\]?):([0-9]+)(?:,server(?:=on)?)?$")


def parse_target(target: str) -> str:
    """Return the address in ``qemu:HOST:PORT``, ``qemu:/path.sock``, or either without ``qemu:``.

    Of a QEMU that is named, by ``pid:N``, ``name:NAME`` or ``running``, it is looked up.
    ``libvirt:DOMAIN`` stays as it is.

    A path comes back absolute: a guardian, or whoever restores, stands in another directory.

    Raises:
        UsageError: none of these, or several guests are meant.
        UnreachableError: there is no such guest, or no way into it.
    """
    if is_named(target):
        return named_address(target)
    if is_domain(target) and target != LIBVIRT:
        return target
    address = target.removeprefix(_PREFIX)
    if is_path(address):
        return str(Path(address.removeprefix("unix:")).absolute())
    if parse_host_port(address) is None:
        raise UsageError(f"{target!r} is not a target: use one of {_FORMS}")
    return address


def connect(target: str, *, timeout_s: float = 5.0) -> Stub:
    """Connect to a guest's gdb stub; the guest is stopped afterwards.

    ``is_held`` of the stub tells whether it was stopped before, as far as that can be known.

    When a QMP or human monitor answers instead, its QEMU is told to open a stub (``gdbserver``)
    on a private socket, which is closed again with the connection.

    Raises:
        UsageError: no target in the text.
        UnreachableError: no stub, a busy one, or none that we know.
    """
    address = parse_target(target)
    # Before the connection, which stops it.
    is_held = is_paused(address)
    stub = _connect(address, is_held=is_held, timeout_s=timeout_s)
    stub.is_held = stub.is_held or _stands(stub)
    return stub


def _stands(stub: Stub) -> bool:
    with contextlib.suppress(TargetError):
        return bool(_STANDS.match(stub.monitor("info status")))
    return False


def is_paused(address: str) -> bool:
    """Whether a guest stands still, as far as that can be known before connecting to its stub.

    Not where another command has stopped it for a moment, to look at it.
    """
    pid = domain_pid(address) if is_domain(address) else listener_pid(address)
    return pid is not None and is_process_paused(pid) is True


def is_process_paused(pid: int) -> bool | None:
    """Return whether the guest of a QEMU process stands still; None where nothing tells."""
    deadline = time.monotonic() + _PAUSED_S
    while (is_running := runs(pid)) is False:
        if time.monotonic() > deadline:
            return True
        time.sleep(_STEP_S)
    return None if is_running is None else False


def _connect(address: str, *, is_held: bool, timeout_s: float) -> Stub:
    if is_domain(address):
        return _through_monitor(address, is_held=is_held, timeout_s=timeout_s)
    sock = dial(address, timeout_s=timeout_s)
    first = handshake(sock, address, timeout_s=timeout_s)
    if not is_monitor(first):
        return Stub.adopt(sock, address, timeout_s=timeout_s, is_held=is_held)
    if first == b"{":
        leave(sock, timeout_s=timeout_s)
    else:
        sock.close()
    return _through_monitor(address, is_held=is_held, timeout_s=timeout_s)


def _through_monitor(monitor_address: str, *, is_held: bool, timeout_s: float) -> Stub:
    with Monitor.open(monitor_address, timeout_s=timeout_s) as monitor:
        is_held |= monitor.command("info status").startswith("VM status: paused")
        address, undo = _existing(monitor, monitor_address), None
        owner = monitor.uid
        if address is None:
            address = _start(monitor, monitor_address)
            undo = partial(_end, monitor_address, address, timeout_s)
        elif _OURS.search(address):
            # A tracer that was killed has left it.
            undo = partial(_end, monitor_address, address, timeout_s)
    try:
        sock = dial(address, timeout_s=timeout_s)
        handshake(sock, address, timeout_s=timeout_s)
        if undo is not None and not is_path(address):
            _check_owner(sock, owner, address)
    except BaseException:
        if undo is not None:
            undo()
        raise
    return Stub.adopt(sock, address, timeout_s=timeout_s, is_held=is_held, on_close=undo)


def _existing(monitor: Monitor, monitor_address: str) -> str | None:
    found = _CHARDEV.search(monitor.command("info chardev"))
    if found is None:
        return None
    if not found[1].startswith(_DISCONNECTED):
        raise UnreachableError(f"{monitor_address}: the gdb stub ({found[1]}) is already in use")
    # Used as it is: QEMU cannot open another beside it, and the user may want it later.
    address = _address_of(found[1].removeprefix(_DISCONNECTED), monitor.pid)
    if address is None:
        raise UnreachableError(f"{monitor_address}: connect to its gdb stub instead: {found[1]}")
    return address


def _address_of(filename: str, pid: int | None) -> str | None:
    if found := _UNIX.match(filename):
        # The path is relative to where QEMU stands.
        base = Path(f"/proc/{pid}/cwd") if pid and found[1][0] != "/" else Path("/")
        return str((base / found[1]).resolve())
    if found := _TCP.match(filename):
        host = "localhost" if found[1] in ("", "0.0.0.0", "::", "[::]") else found[1]
        return f"{host}:{found[2]}"
    return None


def _start(monitor: Monitor, address: str) -> str:
    is_port = not (is_path(address) or is_domain(address))
    host_port = parse_host_port(address) if is_port else None
    if host_port is not None and host_port[0] not in _LOOPBACK:
        # Without a password it must not be open to the network.
        raise UsageError(f"{address}: a monitor elsewhere: start its gdb stub there yourself")
    directory = _directory(domain_pid(address) if is_domain(address) else monitor.pid)
    try:
        address = _open_stub(monitor, directory, address)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if not address.startswith(f"{directory}/"):
        directory.rmdir()
    return address


def _end(monitor_address: str, address: str, timeout_s: float) -> None:
    # The guest may have ended, or its monitor may be in use; nothing else is lost.
    with (
        contextlib.suppress(KprobesError),
        Monitor.open(monitor_address, timeout_s=timeout_s) as monitor,
    ):
        monitor.command("gdbserver none")
    if Path(address).name == _SOCKET:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


def _directory(pid: int | None) -> Path:
    # A QEMU of another user can make its socket only in a directory of its own.
    directory = Path(tempfile.mkdtemp(prefix="kprobes-"))
    with contextlib.suppress(OSError):
        if pid is not None and os.geteuid() == 0:
            os.chown(directory, Path(f"/proc/{pid}").stat().st_uid, -1)
    return directory


def _open_stub(monitor: Monitor, directory: Path, address: str) -> str:
    paths = [directory / _SOCKET]
    if is_path(address):
        # A QEMU of another user, or in a sandbox, cannot make a socket in a directory of ours, but
        # could where its monitor's is. Never a port: any local user could have the guest there.
        paths.append(Path(address).with_name(f"kprobes-{secrets.token_hex(8)}.sock"))
    said = ""
    for path in paths:
        said += monitor.command(f"gdbserver unix:{_escaped(path)},server=on,wait=off")
        if path.is_socket():
            return str(path)
    if is_path(address) or is_domain(address):
        monitor.command("gdbserver none")
        raise _no_stub(said, _CONFINED if is_domain(address) else "")
    return _open_port(monitor, said)


def _open_port(monitor: Monitor, said: str) -> str:
    # The monitor's own port is as open to local users.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer = monitor.command(f"gdbserver tcp:127.0.0.1:{port}")
    if "ould not" in answer:
        raise _no_stub(said + answer)
    return f"127.0.0.1:{port}"


def _check_owner(sock: socket.socket, owner: int | None, address: str) -> None:
    # Another user may have been quicker to take the port.
    if owner is None or peer_uid(sock) != owner:
        sock.close()
        raise UnreachableError(f"{address}: another user's, or not to be told from another user's")


def _no_stub(said: str, advice: str = "") -> UnreachableError:
    first = said.strip().partition("\n")[0][:_MAX_WORDS]
    return UnreachableError(f"QEMU opens no gdb stub: {first or 'it does not say why'}{advice}")


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")
