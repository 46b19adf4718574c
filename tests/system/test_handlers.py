"""Python handlers on real kernels: what they see is true, and what they change happens."""

import re
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

import kprobes
from kprobes import Kprobe
from kprobes.errors import DefinitionError, MemoryFault, RefusedError
from kprobes.handlers.registers import Registers
from kprobes.model.kernel import Symbol
from kprobes.open import GuestSession
from kprobes.plan.strategy import Wish
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB, Addr
from tests.build.dialect import dialect_of
from tests.build.json_lines import parsed
from tests.system.handling import PARENT, READ, comm, emptied, getppid, leave, output

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

SUITES = {"6.1": "bookworm", "6.12": "bookworm-backports"}
_OPEN = "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0(how):x64"
_SHOWN = {
    "amd64": (r"RIP: 0010:{place}\nRSP: 0018:", 7),
    "arm64": (r"pstate: [0-9a-f]{{8}} \(.*\)\npc : {place}\nlr : 0x", 14),
}
"""How registers are shown, and in how many lines."""


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def shared(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    options = MachineOptions(arch=arch, suite=request.param)
    with kprobes.boot(options) as session:
        yield session


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def kernel(shared: GuestSession, told: list[str]) -> Generator[GuestSession]:
    """A guest whose handlers are gone, and whose text is as before, when a test ends."""
    yield from emptied(shared, told)


def test_arguments_are_what_a_compiled_probe_records_of_the_same_hits(kernel: GuestSession) -> None:
    seen = Counter[tuple[int, str | None, int]]()

    @kernel.entry("do_sys_openat2")
    def opened(dfd: int, filename: Any, how: Any, *, regs: Registers) -> None:
        try:
            path = filename.string()
        except MemoryFault:
            path = None
        if comm(regs) == "cat":
            seen[dfd, path, how.flags] += 1

    kernel.probe(_OPEN)
    with kernel.record() as trace:
        kernel.run(list(READ))

    events = parsed(trace.to_json(numbers="number"))
    args = [event["args"] for event in events if event["comm"] == "cat"]
    recorded = Counter((int(a["dfd"]), a["path"], int(a["flags"])) for a in args)
    assert seen == recorded
    assert seen.total() >= 3
    assert (opened.nmissed, opened.errors) == (0, 0)


def test_the_current_task_and_its_structs_are_typed(kernel: GuestSession) -> None:
    found: list[tuple[object, ...]] = []

    @kernel.kprobe(getppid(kernel))
    def before(probe: Kprobe, regs: Registers) -> None:
        task = regs.task
        if comm(regs) == "sh":
            found.append((task.pid, task.tgid, task.real_parent.pid, task.cred.uid.val))

    parent, own = output(kernel, *PARENT).split()

    assert (int(own), int(own), int(parent), 0) in found
    assert before.errors == 0


def test_members_are_followed_through_pointers(kernel: GuestSession) -> None:
    names = Counter[str]()

    @kernel.entry("vfs_open")
    def opened(path: Any) -> None:
        assert path[0]["dentry"] == path.dentry
        assert path.dentry.d_inode.i_sb.s_root.d_inode
        names[path.dentry.d_name.name.string()] += 1

    output(kernel, *READ)

    assert names["version"] >= 1
    assert names["passwd"] >= 1
    assert opened.errors == 0


def test_registers_are_shown_as_the_kernel_shows_them(kernel: GuestSession, arch: str) -> None:
    shown: list[str] = []
    probe = Kprobe(symbol_name="vfs_open", pre_handler=lambda probe, regs: shown.append(repr(regs)))

    with kernel.register_kprobe(probe):
        output(kernel, *READ)

    addr = kernel.address("vfs_open")
    assert probe.addr in (addr, addr + 4)
    before = dialect_of(kernel).before
    start, lines = _SHOWN[arch]
    assert re.match(start.format(place=re.escape(kernel.symbol(probe.addr + before))), shown[0])
    assert len(shown[0].splitlines()) == lines


def test_a_changed_argument_is_what_the_function_gets(kernel: GuestSession) -> None:
    @kernel.kprobe("do_group_exit")
    def before(probe: Kprobe, regs: Registers) -> None:
        if regs.args.exit_code == 1 << 8:
            regs.args.exit_code = 42 << 8

    assert kernel.run(["false"]).status == 42
    before.disable()
    assert kernel.run(["false"]).status == 1


def test_an_opened_file_is_redirected_by_writing_its_name(kernel: GuestSession) -> None:
    kernel.run("echo one > /tmp/aaaa; echo two > /tmp/bbbb")

    @kernel.entry("do_sys_openat2")
    def opened(filename: Any, how: Any, *, regs: Registers) -> None:
        if comm(regs) == "cat" and filename.string() == "/tmp/aaaa":
            regs.user.write(int(filename), b"/tmp/bbbb")
            # O_NOATIME, which only the file's owner may ask for.
            how.flags |= 0o1000000

    assert output(kernel, "cat", "/tmp/aaaa") == "two\n"
    opened.unregister()
    assert output(kernel, "cat", "/tmp/aaaa") == "one\n"


def test_flags_in_a_struct_of_the_kernel_are_changed(kernel: GuestSession) -> None:
    @kernel.entry("do_sys_openat2")
    def opened(filename: Any, how: Any, *, regs: Registers) -> None:
        if comm(regs) == "sh" and filename.string() == "/tmp/log":
            how.flags &= ~0o1000  # O_TRUNC

    kernel.run(["sh", "-c", "echo a long first line > /tmp/log"])
    kernel.run(["sh", "-c", "echo x > /tmp/log"])

    assert output(kernel, "cat", "/tmp/log") == "x\nlong first line\n"
    assert opened.errors == 0


def test_a_function_is_skipped_as_override_function_with_return_does(kernel: GuestSession) -> None:
    after = Counter[str]()

    def count_after(probe: Kprobe, regs: Registers, flags: int) -> None:
        after[comm(regs)] += 1

    @kernel.kprobe(getppid(kernel), post_handler=count_after)
    def before(probe: Kprobe, regs: Registers) -> bool:
        if comm(regs) != "sh":
            return False
        leave(kernel, regs, 4242)
        return True

    assert output(kernel, *PARENT).split()[0] == "4242"
    assert "sh" not in after
    assert before.errors == 0


def test_a_false_handler_runs_the_instruction_whatever_ip_says(kernel: GuestSession) -> None:
    dialect = dialect_of(kernel)

    def before(probe: Kprobe, regs: Registers) -> None:
        regs[dialect.pc] = 0

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        assert (probe.addr, flags) == (regs[dialect.pc] - dialect.site, 0)

    probe = Kprobe(symbol_name=getppid(kernel), pre_handler=before, post_handler=after)
    with kernel.register_kprobe(probe):
        parent, own = output(kernel, *PARENT).split()

    assert 0 < int(parent) < int(own)
    assert probe.hits >= 2
    assert probe.errors == 0


def test_a_way_that_leads_nowhere_is_not_taken(kernel: GuestSession, told: list[str]) -> None:
    @kernel.kprobe(getppid(kernel))
    def nowhere(probe: Kprobe, regs: Registers) -> bool:
        # Its data, well after its code.
        regs[dialect_of(kernel).pc] = kernel.kernel.text[1] + 4 * MIB
        return True

    @kernel.kprobe("vfs_open")
    def unset(probe: Kprobe, regs: Registers) -> bool:
        return True

    @kernel.kprobe("vfs_statx")
    def lower(probe: Kprobe, regs: Registers) -> None:
        regs.sp -= 64

    parent = output(kernel, *PARENT).split()[0]
    output(kernel, "ls", "/")

    assert int(parent) > 0
    assert nowhere.errors == nowhere.hits > 0
    assert unset.errors == unset.hits > 0
    assert lower.errors == lower.hits > 0
    assert [
        what for line in told for what in ("not code", "did not set", "lowered") if what in line
    ]
    assert len(told) == 3


def test_handlers_run_before_and_after_any_instruction(
    kernel: GuestSession, told: list[str]
) -> None:
    # A function's instructions one by one: after each comes the next, unless it is a jump.
    function = kernel.kernel.symbols.named(getppid(kernel))
    dialect = dialect_of(kernel)
    steps = Counter[tuple[int, int]]()

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        assert probe.addr is not None
        steps[probe.addr - function.addr, regs[dialect.pc] - function.addr] += 1

    def before(probe: Kprobe, regs: Registers) -> None:
        assert probe.addr == regs[dialect.pc] - dialect.before
        if "orig_ax" in regs and regs.orig_ax != (1 << 64) - 1:
            assert probe.offset in (0, 4)

    probes = probes_on_every_instruction(kernel, function, before, after)
    hits = [probe.hits for probe in probes]
    parent, own = output(kernel, *PARENT).split()

    assert 0 < int(parent) < int(own)
    assert told == []
    assert [probe.errors for probe in probes] == [0] * len(probes)
    assert [probe.nmissed for probe in probes] == [0] * len(probes)
    assert any(n > m for probe, m in zip(probes, hits, strict=True) for n in [probe.hits])
    inside = {start for start, _ in steps}
    assert all(stop in inside or not 0 <= stop < function.size for _, stop in steps)


def probes_on_every_instruction(
    kernel: GuestSession, function: Symbol, before: Any, after: Any
) -> list[Kprobe]:
    """Register probes wherever one can be: of a start and its ftrace site, at the site."""
    look = kernel.driver.places.find_site(Wish())
    found: dict[Addr, Kprobe] = {}
    for offset in range(function.size):
        with suppress(DefinitionError, RefusedError):
            patched = look(Addr(function.addr + offset)).addr
            probe = Kprobe(
                symbol_name=function.name, offset=offset, pre_handler=before, post_handler=after
            )
            found[patched] = probe
    probes = list(found.values())
    kernel.register_kprobes(probes)
    return probes


def test_a_register_that_is_changed_in_the_middle_is_what_the_function_goes_on_with(
    kernel: GuestSession,
) -> None:
    # The last instruction before the return: what the function returns is changed there.
    function = kernel.kernel.symbols.named(getppid(kernel))
    dialect, last = dialect_of(kernel), list[Kprobe]()

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        is_left = not 0 <= regs[dialect.pc] - function.addr < function.size
        # Not by a call, which has arguments.
        is_return = "+0x0/" not in kernel.symbol(regs[dialect.pc])
        if is_left and is_return and comm(regs) == "sh":
            regs[dialect.value] = 999
            last.append(probe)

    probes_on_every_instruction(kernel, function, None, after)
    parent = output(kernel, *PARENT).split()[0]

    assert parent == "999"
    assert last


def test_kernel_data_is_written_and_code_is_not(kernel: GuestSession) -> None:
    found: dict[str, int] = {}

    @kernel.entry("vfs_open")
    def opened(path: Any, *, regs: Registers) -> None:
        if path.dentry.d_name.name.string() == "passwd":
            found["comm"] = regs.task.comm.address_
            found["operations"] = int(path.dentry.d_inode.i_fop)

    # It is a shell yet when it opens what it will read.
    until = 'until [ "$(cat /proc/$!/comm)" = sleep ]; do usleep 9000; done'
    script = f"sleep 60 < /etc/passwd > /dev/null & echo $!; {until}"
    pid = int(output(kernel, "sh", "-c", script))
    opened.unregister()
    assert output(kernel, "cat", f"/proc/{pid}/comm") == "sleep\n"

    kernel.write(found["comm"], b"renamed\0")

    assert output(kernel, "cat", f"/proc/{pid}/comm") == "renamed\n"
    output(kernel, "kill", str(pid))
    with pytest.raises(RefusedError, match="is code"):
        kernel.write(kernel.address("vfs_read"), b"\xcc")
    with pytest.raises(MemoryFault, match="read-only"):
        kernel.write(found["operations"], b"x")
    assert kernel.symbol(kernel.address("vfs_read") + 0x1C).startswith("vfs_read+0x1c/0x")


@pytest.mark.arches("amd64")
def test_named_data_is_written(kernel: GuestSession) -> None:
    addr = kernel.address("panic_timeout")
    before = kernel.read(addr, 4)
    assert output(kernel, "cat", "/proc/sys/kernel/panic") == f"{kernel.object('int', addr)}\n"

    kernel.write(addr, (17).to_bytes(4, "little"))

    assert output(kernel, "cat", "/proc/sys/kernel/panic") == "17\n"
    kernel.write(addr, before)
    assert kernel.string(kernel.address("linux_banner")) == output(kernel, "cat", "/proc/version")
