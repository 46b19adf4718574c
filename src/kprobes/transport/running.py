"""QEMU processes of this machine, by their command lines and what /proc has of them.

No stub or monitor is connected to, and no guest stands still for it. QEMU's options are written
down in its manual, "Invocation"; where one is given several times the last one counts, but for
stubs and monitors, of which a guest may have several.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport.address import (
    LIBVIRT,
    PROC,
    is_domain,
    is_path,
    open_files,
    parse_host_port,
    pids,
    socket_table,
)
from kprobes.transport.find_ram import Mapping as MemoryMapping
from kprobes.transport.find_ram import parse_maps
from kprobes.units import MIB

RUNNING = "running"
"""The target that is the only guest that runs."""
VNG = "vng"
"""The target that is the only guest that virtme-ng runs."""
_PID, _NAME, _VNG = "pid:", "name:", "vng:"
_OF_LIBVIRT = "charmonitor"
"""The device by which libvirt, and nobody else, talks to a QEMU."""
_OF_VNG = "virtme_"
"""In the kernel's command line: words that virtme-ng's init reads."""
_PROGRAM = re.compile(r"qemu-system-(\w+)|qemu-kvm|kvm")
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
_DEFAULT_MEMORY = 128 * MIB
_UNITS = {"B": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([BKMGT]?)B?", re.IGNORECASE)
_STUB = "tcp::1234"
_NONE = {
    RUNNING: "no guest runs on this machine",
    VNG: "no guest of virtme-ng runs on this machine",
}
_BARE_WORDS = (
    "S s enable-kvm nographic no-reboot no-shutdown daemonize snapshot nodefaults no-user-config "
    "full-screen no-acpi no-hpet no-fd-bootchk mem-prealloc usb preconfig singlestep h help "
    "version win2k-hack xen-attach xen-domid-restrict old-param semihosting only-migratable "
    "no-kvm sdl curses portrait no-quit no-frame alt-grab ctrl-grab nouserconfig"
)
"""Options without a value."""
_IMPLIED = {"name": "guest", "m": "size", "smp": "cpus", "machine": "type", "accel": "accel"}
"""By option: what its first word means where it has no key."""
_SAME = {"M": "machine"}
_BARE = frozenset(_BARE_WORDS.split())
_SOCKETS = ("cpus", "sockets", "dies", "clusters", "cores", "threads")
_KVM = "anon_inode:kvm-vm"
_ESCAPED = "\0"

_Options = dict[str, list[str]]


class CommandLine(Struct, frozen=True, kw_only=True):
    """What a QEMU was told when it was started.

    Attributes:
        arch: of its guest, in Debian's words or QEMU's; "" where its name does not say.
        name: of its guest, or "".
        cpus: of its guest.
        memory: of its guest, in bytes.
        accel: the accelerator that is tried first.
        machine: the machine's type, or "" for the default one.
        kernel: the file that it boots, or "".
        stubs: where gdb stubs listen: ``HOST:PORT``, or a path that may be relative to where QEMU
            stands.
        monitors: likewise of QMP and human monitors; ``libvirt:NAME`` of the one that libvirt has.
        is_vng: whether virtme-ng has started it.
    """

    arch: str
    name: str
    cpus: int
    memory: int
    accel: str
    machine: str
    kernel: str
    stubs: tuple[str, ...]
    monitors: tuple[str, ...]
    is_vng: bool = False

    @property
    def stub(self) -> str:
        """Where its first stub listens, or ""."""
        return next(iter(self.stubs), "")

    @property
    def monitor(self) -> str:
        """Where its first monitor listens, or ""."""
        return next(iter(self.monitors), "")

    @property
    def advice(self) -> str:
        """What to do where neither a stub nor a monitor listens; else ""."""
        if self.stub or self.monitor:
            return ""
        how = "vng --debug" if self.is_vng else "-s, or with -qmp"
        return f"its QEMU has no gdb stub and no monitor on a socket: start it with {how}"


class Qemu(Struct, frozen=True, kw_only=True):
    """One QEMU process.

    Attributes:
        pid: its number.
        command: how it was started; paths of sockets are absolute.
        files: what it has open, as readlink(2) shows it; None where that is hidden.
        ram: where its guest's memory is, or None where that is hidden.
    """

    pid: int
    command: CommandLine
    files: frozenset[str] | None
    ram: MemoryMapping | None

    @property
    def accel(self) -> str:
        """Its accelerator."""
        if self.files is None:
            return self.command.accel
        return "kvm" if _KVM in self.files else "tcg"

    def is_free(self, address: str, proc: Path = PROC) -> bool:
        """Whether a client of its stub or monitor would be served at once: nobody else is."""
        clients = _clients(address, proc)
        return not any(self.files is None or f"socket:[{each}]" in self.files for each in clients)


def find_qemus(proc: Path = PROC) -> list[Qemu]:
    """Return the QEMU processes that this user may look at, by their numbers."""
    found: list[Qemu] = []
    for pid in sorted(pids(proc)):
        with suppress(OSError, ValueError):
            command = _command_of(proc / str(pid))
            if command is not None:
                found.append(_read_files(proc / str(pid), pid, command))
    return found


def booted_file(pid: int, proc: Path = PROC) -> Path | None:
    """Return the file that a QEMU was told to boot its guest from, as seen from here, or None."""
    process = proc / str(pid)
    with suppress(OSError, ValueError):
        command = _command_of(process)
        if command is not None and command.kernel:
            return Path((process / "cwd").readlink(), command.kernel)
    return None


def _command_of(process: Path) -> CommandLine | None:
    words = (process / "cmdline").read_bytes().split(b"\0")[:-1]
    return parse_command([os.fsdecode(word) for word in words])


def parse_command(words: Sequence[str]) -> CommandLine | None:
    """Return what a command line says, or None where it is not QEMU's."""
    program = _PROGRAM.fullmatch(Path(words[0]).name) if words else None
    if program is None:
        return None
    options = _options(words[1:])
    last = {name: _keys(name, values[-1]) for name, values in options.items() if values}
    machine = _merged("machine", options)
    devices = _devices(options)
    stubs = [*options.get("gdb", ()), *(_STUB for _ in options.get("s", ()))]
    name = last.get("name", {}).get("guest", "")
    accel = [each.get("accel", "") for each in _all("accel", options)]
    accel += ["kvm"] if "enable-kvm" in options else []
    accel += [machine["accel"]] if "accel" in machine else []
    return CommandLine(
        arch=_ARCHITECTURES.get(program[1] or "", program[1] or ""),
        name=name,
        cpus=_cpus(last.get("smp", {})),
        memory=_size(last.get("m", {}).get("size", "")) or _DEFAULT_MEMORY,
        accel=(accel or ["tcg"])[0].partition(":")[0],
        machine=machine.get("type", ""),
        kernel=(options.get("kernel") or [""])[-1],
        stubs=tuple(_listening(stubs, devices)),
        monitors=tuple(_monitors(options, devices, name)),
        is_vng=any(_OF_VNG in text for text in options.get("append", ())),
    )


def is_named(target: str) -> bool:
    """Whether a target names a process: ``pid:N``, ``name:NAME``, ``vng:NAME``, ``running``."""
    return target in (RUNNING, VNG) or target.startswith((_PID, _NAME, _VNG))


def named_address(target: str, proc: Path = PROC) -> str:
    """Return where the stub of the QEMU listens that a target names, or else its monitor.

    Raises:
        UsageError: several guests are meant, or no process could be.
        UnreachableError: there is no such guest, or no way into it.
    """
    number = target.removeprefix(_PID)
    if target in (_NAME, _VNG) or (target.startswith(_PID) and not number.isdecimal()):
        raise UsageError(f"{target!r} is not a target: use pid:NUMBER, name:NAME or vng:NAME")
    found = [qemu for qemu in find_qemus(proc) if _is_meant(qemu, target)]
    if not found:
        none = _NONE.get(target, f"{target}: no such guest")
        raise UnreachableError(f"{none}; `kprobe targets` lists those that this user may look at")
    if len(found) > 1:
        names = ", ".join(f"pid:{qemu.pid}" for qemu in found)
        raise UsageError(f"{target}: {len(found)} guests run: use one of {names}")
    command = found[0].command
    if command.advice:
        raise UnreachableError(f"{target}: {command.advice}")
    return command.stub or command.monitor


def domain_pid(address: str, proc: Path = PROC) -> int | None:
    """Return the QEMU process of ``libvirt:DOMAIN``, or None where it is not seen here."""
    found = (qemu for qemu in find_qemus(proc) if address in qemu.command.monitors)
    return next((qemu.pid for qemu in found), None)


def _is_meant(qemu: Qemu, target: str) -> bool:
    name = qemu.command.name
    names = [RUNNING, f"{_PID}{qemu.pid}", f"{_NAME}{name}"]
    return target in ([*names, VNG, f"{_VNG}{name}"] if qemu.command.is_vng else names)


def _read_files(process: Path, pid: int, command: CommandLine) -> Qemu:
    with suppress(OSError):
        cwd = (process / "cwd").readlink()
        stubs, monitors = (
            tuple(str(cwd / each) if is_path(each) else each for each in addresses)
            for addresses in (command.stubs, command.monitors)
        )
        command = replace(command, stubs=stubs, monitors=monitors)
    return Qemu(
        pid=pid,
        command=command,
        files=frozenset(open_files(process / "fd")) or None,
        ram=_find_ram(process / "maps", command.memory),
    )


def _find_ram(maps: Path, size: int) -> MemoryMapping | None:
    # The largest one that may be written: the guest's memory, or the greater part of it.
    try:
        with maps.open(encoding="utf-8", errors="replace") as lines:
            mappings = [each for each in parse_maps(iter(lines)) if each.flags.startswith("rw")]
    except (OSError, ValueError):
        return None
    found = max(mappings, key=lambda each: each.stop - each.start, default=None)
    return found if found is not None and 2 * (found.stop - found.start) >= size else None


def _options(words: Sequence[str]) -> _Options:
    found: _Options = {}
    left = iter(words)
    for word in left:
        name = word.lstrip("-")
        name = _SAME.get(name, name)
        if word.startswith("-"):
            found.setdefault(name, []).append("" if name in _BARE else next(left, ""))
    return found


def _keys(option: str, value: str) -> dict[str, str]:
    # key=value,key=value, in which a comma of a value is written twice.
    found: dict[str, str] = {}
    for number, part in enumerate(value.replace(",,", _ESCAPED).split(",")):
        key, equals, text = part.replace(_ESCAPED, ",").partition("=")
        if equals:
            found[key] = text
        elif number == 0 and option in _IMPLIED:
            found[_IMPLIED[option]] = key
        else:
            found[key] = "on"
    return found


def _all(option: str, options: _Options) -> list[dict[str, str]]:
    return [_keys(option, value) for value in options.get(option, ())]


def _merged(option: str, options: _Options) -> dict[str, str]:
    # Of some options a later one adds to those before.
    found: dict[str, str] = {}
    for each in _all(option, options):
        found |= each
    return found


def _cpus(smp: Mapping[str, str]) -> int:
    numbers = {key: int(smp[key]) for key in _SOCKETS if smp.get(key, "").isdecimal()}
    if "cpus" in numbers:
        return numbers["cpus"]
    count = 1
    for number in numbers.values():
        count *= number
    return count


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    return 0 if found is None else int(float(found[1]) * (1 << _UNITS[found[2].upper() or "M"]))


def _devices(options: _Options) -> dict[str, str]:
    # Sockets that other options name: -chardev socket,id=ID,path=PATH or host=HOST,port=PORT.
    found: dict[str, str] = {}
    for each in _all("chardev", options):
        if "socket" in each and each.get("server", "off") != "off" and "id" in each:
            path, port = each.get("path"), f"{each.get('host', '')}:{each.get('port', '')}"
            found[each["id"]] = f"tcp:{port}" if path is None else f"unix:{path}"
    return found


def _monitors(options: _Options, devices: Mapping[str, str], name: str) -> Iterator[str]:
    if name and any(each.get("id") == _OF_LIBVIRT for each in _all("chardev", options)):
        yield f"{LIBVIRT}{name}"
    found = [*options.get("qmp", ()), *options.get("qmp-pretty", ()), *options.get("monitor", ())]
    found += (f"chardev:{each.get('chardev', '')}" for each in _all("mon", options))
    yield from _listening(found, devices)


def _listening(devices: Iterable[str], known: Mapping[str, str]) -> Iterator[str]:
    # unix:PATH,server=on,wait=off; tcp:HOST:PORT,server; telnet:... likewise; chardev:ID.
    for device in devices:
        kind, _, rest = device.partition(":")
        if kind == "chardev":
            kind, _, rest = known.get(rest, "").partition(":")
        where = rest.replace(",,", _ESCAPED).partition(",")[0].replace(_ESCAPED, ",")
        if kind == "unix" and where:
            yield where if is_path(where) else f"./{where}"
        elif kind in ("tcp", "telnet") and (found := parse_host_port(where)) is not None:
            host = "localhost" if found[0] in ("0.0.0.0", "::") else found[0]
            yield f"[{host}]:{found[1]}" if ":" in host else f"{host}:{found[1]}"


def _clients(address: str, proc: Path) -> Iterator[str]:
    # Inodes of connections that somebody has accepted, at his end.
    if is_domain(address):
        return
    if is_path(address):
        name = Path(address).name
        for line in socket_table("unix", proc):
            words = line.split(maxsplit=7)
            if len(words) == 8 and words[5] == "03" and Path(words[7]).name == name:
                yield words[6]
        return
    _, port = parse_host_port(address) or ("", 0)
    for name in ("tcp", "tcp6"):
        for line in socket_table(name, proc):
            words = line.split()
            if words[3] == "01" and int(words[1].rsplit(":", 1)[1], 16) == port:
                yield words[9]
