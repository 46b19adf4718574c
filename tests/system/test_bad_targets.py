"""Targets and definitions that cannot work: one clear line each, and nothing has happened."""

import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kprobes
from kprobes.errors import (
    AmbiguousSymbolError,
    DefinitionError,
    GuestGoneError,
    KprobesError,
    RefusedError,
    TargetError,
    UnreachableError,
)
from kprobes.formats import btf_index
from kprobes.guest.journal import entries
from kprobes.model.events import Events
from kprobes.transport.monitor import Monitor
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.transport.stub import Stub
from kprobes.units import MIB
from tests.build.bare import bare_guest
from tests.build.console_guest import console_guest
from tests.build.victim import Home, Witness, settle, witness_of
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

NO_LINUX: dict[str, dict[str, str]] = {
    "amd64": {
        "stopped at reset": "firmware",
        "firmware": "firmware",
        "64-bit": "still in firmware, or not Linux",
        "32-bit": "not in 64-bit mode: in firmware, or a 32-bit system",
    },
    "arm64": {
        "stopped at reset": "firmware",
        "firmware": "firmware",
        "64-bit": "still in firmware, or not Linux",
        "no translation": "the guest is not in a 64-bit kernel yet",
    },
}
"""What runs there, and what we say of it."""
LINEAR = {"amd64": 0xFFFF_8880_0000_0000, "arm64": 0xFFFF_0000_0000_0000}
"""Where kernels map all memory: what is there is no list of theirs."""
UNREADABLE = {"amd64": "cannot read", "arm64": "its list of them was not found"}
"""What we say of a list that leads nowhere: arm64 names no data, and then it is no such list."""
UNPROBED = {"amd64": "native_safe_halt", "arm64": "el1h_64_irq_handler"}
SLOW_S = 60.0
"""No damage may hold an attach up for longer."""
DAMAGES = range(int(float(os.environ.get("KPROBES_STORM", "6"))))
"""How often RAM is damaged by chance, each time differently."""
WRITES = 3000


class Scene:
    """A guest, and a witness that has seen it as it was."""

    def __init__(self, machine: Machine, home: Home, witness: Witness) -> None:
        self.machine = machine
        self.target = str(machine.stub_address)
        self.home = home
        self.witness = witness

    def is_as_before(self) -> bool:
        return self.witness.is_pristine() and self.runs()

    def free_mib(self) -> int:
        found = self.machine.run("awk '/MemAvailable/ { print $2 }' /proc/meminfo", 10).output
        return int(found) // 1024

    def runs(self) -> bool:
        return self.machine.run("true", 10).status == 0

    @contextmanager
    def damaged(self, addr: int, data: bytes) -> Generator[None]:
        """Have other bytes in the guest's memory for a while."""
        memory = self.witness.guest.memory
        before = memory.read(addr, len(data))
        memory.write(addr, data)
        yield
        memory.write(addr, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def scene(home: Home, arch: str) -> Generator[Scene]:
    with Machine.boot(MachineOptions(memory_mib=256, arch=arch)) as machine:
        settle(machine)
        yield Scene(machine, home, witness_of(str(machine.stub_address), home))


@pytest.fixture(autouse=True)
def _nothing_is_left(home: Home) -> Generator[None]:
    with home.entered():
        yield
        assert list(entries()) == []


class Comms:
    """A sink that counts events of one program."""

    def __init__(self, comm: bytes) -> None:
        self.count = 0
        self._comm = comm

    def write(self, events: Events) -> None:
        self.count += sum(int((batch.comm == self._comm).sum()) for batch in events.batches)

    def close(self) -> None:
        pass


# The stub.


def test_a_closed_port_is_told_in_one_line() -> None:
    with pytest.raises(UnreachableError) as caught, kprobes.attach(f"localhost:{_free_port()}"):
        pass

    assert _is_one_line(caught.value)


def test_a_stub_in_use_is_told_in_time_and_the_guest_runs_on(scene: Scene) -> None:
    with Stub.open(scene.target) as other:
        other.resume()
        start = time.monotonic()

        with pytest.raises(UnreachableError, match="in use") as caught:
            kprobes.attach(scene.target)

        assert time.monotonic() - start < SLOW_S
        assert _is_one_line(caught.value)
        assert scene.witness.runs_within(SLOW_S)
        other.stop()
    # QEMU takes the second client up only now, and stops the guest for it.
    assert scene.is_as_before()


# What runs there.


@pytest.mark.parametrize(
    ("board", "what", "says"),
    [(board, *each) for board, found in NO_LINUX.items() for each in found.items()],
)
def test_a_guest_that_is_no_linux_is_told_in_one_line(
    tmp_path: Path, board: str, what: str, says: str
) -> None:
    with bare_guest(tmp_path, board, what) as target:
        found = _status(tmp_path)
        for _ in range(2):
            with pytest.raises(TargetError, match=says) as caught:
                kprobes.attach(target)

            assert _is_one_line(caught.value)
        assert _status(tmp_path) == found


# Damage.


@pytest.mark.parametrize("seed", DAMAGES)
@pytest.mark.parametrize("what", ["kallsyms", "btf"])
def test_damaged_tables_neither_crash_nor_hang_us(
    scene: Scene, tmp_path: Path, what: str, seed: int
) -> None:
    chance = random.Random(seed)
    tables: Any = scene.witness.guest.kernel.symbols
    spans = list(tables.table.sources) if what == "kallsyms" else [_btf(scene)]
    free, start = scene.free_mib(), time.monotonic()
    with ExitStack() as damage, Home(tmp_path).entered():
        for addr, size in spans:
            for _ in range(chance.choice([1, 10, 1000])):
                place = addr + chance.randrange(size - 8)
                data = chance.choice([chance.randbytes(8), b"\0" * 8, b"\xff" * 8])
                damage.enter_context(scene.damaged(place, data[: chance.randint(1, 8)]))

        error = _attempt(scene, "p:opened do_sys_openat2 name=+0($arg2):ustring")

    assert time.monotonic() - start < SLOW_S
    assert error is None or _is_one_line(error)
    assert scene.is_as_before()
    assert scene.free_mib() > free - 8


@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"\x10\0\0\0\0\0\0\0", "{unreadable}"),
        (0, b"linear", ""),
        ("next", b"self", "has no end"),
        ("records", b"\xff" * 8, "{unreadable}"),
        ("count", b"\xff\xff\xff\xff", "has no end"),
        ("count", b"\xff\xff\xff\x7f", "has no end"),
    ],
)
def test_a_damaged_list_of_sites_is_told_in_one_line(
    scene: Scene, arch: str, at: int | str, data: bytes, says: str
) -> None:
    # struct ftrace_page { next; records; int index; }
    memory, first = scene.witness.guest.memory, scene.witness.address("ftrace_pages_start")
    page = memory.u64(first)
    place = {"next": page, "records": page + 8, "count": page + 16}.get(str(at), first)
    addr = {b"self": page, b"linear": LINEAR[arch]}.get(data)
    data = data if addr is None else addr.to_bytes(8, "little")
    start = time.monotonic()
    with scene.damaged(place, data):
        error = _attempt(scene, "p vfs_read")

    assert time.monotonic() - start < SLOW_S
    assert error is None or _is_one_line(error)
    says = says.format(unreadable=UNREADABLE[arch])
    assert says == "" or (error is not None and says in str(error))
    assert scene.is_as_before()


# Definitions.


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("p vfs_raed", DefinitionError, "vfs_read"),
        ("p vfs_read a=$arg1:u65", DefinitionError, "^"),
        ("p no_such_function_*", KprobesError, "no_such_function_*"),
        ("p {unprobed}", RefusedError, "cannot be probed"),
        ("p vfs_read\np vfs_write\np vfs_raed", DefinitionError, "vfs_read"),
    ],
)
def test_a_bad_definition_is_refused_and_nothing_is_patched(
    scene: Scene, arch: str, text: str, kind: type[KprobesError], says: str
) -> None:
    with kprobes.attach(scene.target) as session:
        with pytest.raises(kind) as caught:
            session.probe(text.format(unprobed=UNPROBED[arch]))

        assert says in str(caught.value)
        assert session.definitions == []
        (journal,) = entries()
        assert journal.patches == ()
    assert scene.is_as_before()


def test_a_name_of_two_functions_is_refused(scene: Scene) -> None:
    symbols: Any = scene.witness.guest.kernel.symbols
    names = [symbol.name for symbol in symbols.glob("*_show") if symbol.is_text]
    twice = next(name for name in names if names.count(name) > 1)

    with kprobes.attach(scene.target) as session:
        with pytest.raises((AmbiguousSymbolError, DefinitionError)) as caught:
            session.probe(f"p {twice}")

        assert twice in str(caught.value)
    assert scene.is_as_before()


# The guest's end.


def test_what_a_killed_guest_had_recorded_is_delivered(boot: Boot) -> None:
    machine = boot(memory_mib=256)
    target = str(machine.stub_address)

    count = _killed_while_tracing(target, machine.pid, lambda: machine.run(_writes(), 180))

    assert count >= WRITES


def test_what_went_wrong_first_is_told_though_the_guest_is_gone_too(boot: Boot) -> None:
    machine = boot(cpus=1)
    with (
        pytest.raises(LookupError, match="mine"),
        kprobes.attach(str(machine.stub_address)),
    ):
        _fail_without(machine)


def _fail_without(machine: Machine) -> None:
    os.kill(machine.pid, signal.SIGKILL)
    raise LookupError("mine")


def test_what_a_killed_guest_had_recorded_is_delivered_without_shared_memory(
    tmp_path: Path, arch: str
) -> None:
    with console_guest(tmp_path, suite="bookworm", arch=arch) as guest:
        count = _killed_while_tracing(guest.target, guest.pid, lambda: guest.run(_writes()))

    assert count >= WRITES


def _killed_while_tracing(target: str, pid: int, work: Callable[[], object]) -> int:
    """Trace until the work is done, kill the guest, and return how many writes were delivered."""
    sink = Comms(b"dd")
    done: list[float] = []

    def is_done() -> bool:
        if not done:
            work()
            done.append(time.monotonic())
        elif len(done) == 1 and (sink.count >= WRITES or time.monotonic() > done[0] + 30):
            os.kill(pid, signal.SIGKILL)
            done.append(0)
        return False

    with kprobes.attach(target) as session:
        session.probe("p vfs_write")
        with pytest.raises(GuestGoneError) as caught:
            session.stream(sink, is_done=is_done)
    assert _is_one_line(caught.value)
    return sink.count


def _writes() -> str:
    return f"dd if=/dev/zero of=/dev/null bs=1 count={WRITES} 2> /dev/null"


def _attempt(scene: Scene, text: str) -> KprobesError | None:
    try:
        with kprobes.attach(scene.target) as session:
            session.probe(text)
            with session.record():
                pass
    except KprobesError as error:
        return error
    return None


def _btf(scene: Scene) -> tuple[int, int]:
    """Return where the types are and their size: not every kernel has a symbol for them."""
    guest = scene.witness.guest
    start = guest.kernel.text[1]
    for run in guest.memory.tables.mapped_runs(start, start + 64 * MIB):
        data = guest.memory.ram.read(run.phys, run.size)
        for found in re.finditer(re.escape(btf_index.MAGIC), data):
            size = btf_index.size_at(data, found.start()) or 0
            if size > MIB:
                return run.virt + found.start(), size
    raise AssertionError("there are no types")


def _is_one_line(error: BaseException) -> bool:
    return 10 < len(str(error)) < 400 and "\n" not in str(error)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _status(directory: Path) -> str:
    with Monitor.open(str(directory / "monitor.sock"), timeout_s=5) as monitor:
        return monitor.command("info status").strip().removeprefix("VM status: ")
