"""Python handlers on real kernels: what they see is true, and what they change happens."""

import json
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

import kprobes
from kprobes import Kprobe
from kprobes.errors import DefinitionError, MemoryFault, RefusedError, UsageError
from kprobes.handlers.registers import Registers
from kprobes.model.symbol import Symbol
from kprobes.plan.choose import Wish
from kprobes.session import Session
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.victim import is_complaint, wait_until
from tests.guest.test_find import modules

pytestmark = pytest.mark.guest

SUITES = {"6.1": "bookworm", "6.12": "bookworm-backports"}
_PARENT = ["sh", "-c", "echo $PPID $$"]
_OPEN = "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0(how):x64"
_READ = ["cat", "/proc/version", "/no/such/file", "/etc/passwd"]


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def shared(request: pytest.FixtureRequest) -> Generator[Session]:
    options = MachineOptions(suite=request.param, files=modules(request.param))
    with kprobes.boot(options) as session:
        yield session


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def kernel(shared: Session, told: list[str]) -> Generator[Session]:
    """A guest whose handlers are gone, and whose text is as before, when a test ends."""
    shared.handlers.report.tell = told.append
    shared.definitions.clear()
    before = text_of(shared)
    yield shared
    shared.unregister_kprobes(shared.handlers.probes)
    assert text_of(shared) == before
    assert [line for line in output(shared, "dmesg").splitlines() if is_complaint(line)] == []


def text_of(kernel: Session) -> bytes:
    start, stop = kernel.kernel.text
    return kernel.driver.guest.memory.read(start, stop - start)


def output(kernel: Session, *command: str) -> str:
    return kernel.run(list(command), 60).output.decode(errors="replace")


def comm(regs: Registers) -> str:
    return str(regs.task.comm)


def _nothing(probe: Kprobe, regs: Registers) -> None: ...


def test_arguments_are_what_a_compiled_probe_records_of_the_same_hits(kernel: Session) -> None:
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
        kernel.run(_READ)

    events = [json.loads(line) for line in trace.to_json().splitlines()]
    args = [event["args"] for event in events if event["comm"] == "cat"]
    recorded = Counter((int(a["dfd"]), a["path"], int(a["flags"])) for a in args)
    assert seen == recorded
    assert seen.total() >= 3
    assert (opened.nmissed, opened.errors) == (0, 0)


def test_the_current_task_and_its_structs_are_typed(kernel: Session) -> None:
    found: list[tuple[object, ...]] = []

    @kernel.kprobe("__x64_sys_getppid")
    def before(probe: Kprobe, regs: Registers) -> None:
        task = regs.task
        if comm(regs) == "sh":
            found.append((task.pid, task.tgid, task.real_parent.pid, task.cred.uid.val))

    parent, own = output(kernel, *_PARENT).split()

    assert (int(own), int(own), int(parent), 0) in found
    assert before.errors == 0


def test_members_are_followed_through_pointers(kernel: Session) -> None:
    names = Counter[str]()

    @kernel.entry("vfs_open")
    def opened(path: Any) -> None:
        assert path[0]["dentry"] == path.dentry
        assert path.dentry.d_inode.i_sb.s_root.d_inode
        names[path.dentry.d_name.name.string()] += 1

    output(kernel, *_READ)

    assert names["version"] >= 1
    assert names["passwd"] >= 1
    assert opened.errors == 0


def test_registers_are_shown_as_the_kernel_shows_them(kernel: Session) -> None:
    shown: list[str] = []
    probe = Kprobe(symbol_name="vfs_open", pre_handler=lambda probe, regs: shown.append(repr(regs)))

    with kernel.register_kprobe(probe):
        output(kernel, *_READ)

    addr = kernel.address("vfs_open")
    assert probe.addr in (addr, addr + 4)
    assert shown[0].startswith(f"RIP: 0010:{kernel.symbol(probe.addr + 1)}\nRSP: 0018:")
    assert len(shown[0].splitlines()) == 7


def test_a_changed_argument_is_what_the_function_gets(kernel: Session) -> None:
    @kernel.kprobe("do_group_exit")
    def before(probe: Kprobe, regs: Registers) -> None:
        if regs.args.exit_code == 1 << 8:
            regs.args.exit_code = 42 << 8

    assert kernel.run(["false"]).status == 42
    before.disable()
    assert kernel.run(["false"]).status == 1


def test_an_opened_file_is_redirected_by_writing_its_name(kernel: Session) -> None:
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


def test_flags_in_a_struct_of_the_kernel_are_changed(kernel: Session) -> None:
    @kernel.entry("do_sys_openat2")
    def opened(filename: Any, how: Any, *, regs: Registers) -> None:
        if comm(regs) == "sh" and filename.string() == "/tmp/log":
            how.flags &= ~0o1000  # O_TRUNC

    kernel.run(["sh", "-c", "echo a long first line > /tmp/log"])
    kernel.run(["sh", "-c", "echo x > /tmp/log"])

    assert output(kernel, "cat", "/tmp/log") == "x\nlong first line\n"
    assert opened.errors == 0


def test_a_function_is_skipped_as_override_function_with_return_does(kernel: Session) -> None:
    after = Counter[str]()

    def count_after(probe: Kprobe, regs: Registers, flags: int) -> None:
        after[comm(regs)] += 1

    @kernel.kprobe("__x64_sys_getppid", post_handler=count_after)
    def before(probe: Kprobe, regs: Registers) -> bool:
        if comm(regs) != "sh":
            return False
        regs.ax = 4242
        regs.ip = probe.kernel.read_u64(regs.sp)
        regs.sp += 8
        return True

    assert output(kernel, *_PARENT).split()[0] == "4242"
    assert "sh" not in after
    assert before.errors == 0


def test_a_false_handler_runs_the_instruction_whatever_ip_says(kernel: Session) -> None:
    def before(probe: Kprobe, regs: Registers) -> None:
        regs.ip = 0

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        assert (probe.addr, flags) == (regs.ip - 5, 0)

    probe = Kprobe(symbol_name="__x64_sys_getppid", pre_handler=before, post_handler=after)
    with kernel.register_kprobe(probe):
        parent, own = output(kernel, *_PARENT).split()

    assert 0 < int(parent) < int(own)
    assert probe.hits >= 2
    assert probe.errors == 0


def test_a_way_that_leads_nowhere_is_not_taken(kernel: Session, told: list[str]) -> None:
    @kernel.kprobe("__x64_sys_getppid")
    def nowhere(probe: Kprobe, regs: Registers) -> bool:
        regs.ip = kernel.address("jiffies")
        return True

    @kernel.kprobe("vfs_open")
    def unset(probe: Kprobe, regs: Registers) -> bool:
        return True

    @kernel.kprobe("vfs_statx")
    def lower(probe: Kprobe, regs: Registers) -> None:
        regs.sp -= 64

    parent = output(kernel, *_PARENT).split()[0]
    output(kernel, "ls", "/")

    assert int(parent) > 0
    assert nowhere.errors == nowhere.hits > 0
    assert unset.errors == unset.hits > 0
    assert lower.errors == lower.hits > 0
    assert [what for line in told for what in ("no code", "did not set", "lowered") if what in line]
    assert len(told) == 3


def test_an_exception_is_told_once_and_changes_nothing(kernel: Session, told: list[str]) -> None:
    @kernel.kprobe("__x64_sys_getppid")
    def before(probe: Kprobe, regs: Registers) -> None:
        regs.ax = regs.ip = 1
        raise RuntimeError("no")

    kernel.run("for i in 1 2 3 4; do sh -c 'echo $PPID'; done")

    line = before.pre_handler.__code__.co_firstlineno + 3  # type: ignore[union-attr]
    where = f"__x64_sys_getppid: pre_handler at {__file__}:{line}"
    assert told == [f"{where}: RuntimeError: no (told once, counted from now on)"]
    assert before.errors == before.hits >= 4


def test_a_fault_goes_to_the_fault_handler(kernel: Session, told: list[str]) -> None:
    faults: list[int] = []

    def handled(probe: Kprobe, regs: Registers, fault: MemoryFault) -> bool:
        faults.append(fault.addr)
        return len(faults) > 1

    @kernel.kprobe("__x64_sys_getppid", fault_handler=handled)
    def before(probe: Kprobe, regs: Registers) -> None:
        kernel.read_u64(8)

    output(kernel, *_PARENT)
    output(kernel, *_PARENT)

    assert before.hits == len(faults) > 1
    assert set(faults) == {8}
    assert (before.errors, len(told)) == (1, 1)


def test_a_slow_handler_is_counted_and_the_guest_goes_on(kernel: Session, told: list[str]) -> None:
    @kernel.kprobe("__x64_sys_getppid", timeout_s=0.05)
    def before(probe: Kprobe, regs: Registers) -> None:
        regs.ax = 7
        time.sleep(0.4)

    def is_told() -> bool:
        # On a busy machine Python may come too late even to begin.
        assert output(kernel, *_PARENT).split()[0] != "7"
        return any("took longer than 0.05 s" in line for line in told)

    assert wait_until(is_told, 20) is not None
    assert before.nmissed >= 1


def test_probes_are_disabled_and_enabled_by_others_and_by_themselves(kernel: Session) -> None:
    @kernel.kprobe("__x64_sys_getppid")
    def once(probe: Kprobe, regs: Registers) -> None:
        probe.disable()

    @kernel.kprobe("__x64_sys_getppid")
    def always(probe: Kprobe, regs: Registers) -> None:
        pass

    output(kernel, *_PARENT)
    output(kernel, *_PARENT)
    assert once.hits == 1
    hits = always.hits
    assert hits >= 2

    always.disable()
    output(kernel, *_PARENT)
    assert (always.hits, once.hits) == (hits, 1)

    always.enable()
    once.enable()
    output(kernel, *_PARENT)
    assert always.hits > hits
    assert once.hits == 2


def test_several_on_one_place_run_newest_first_until_one_goes_elsewhere(kernel: Session) -> None:
    calls: list[str] = []

    def named(name: str, *, is_last: bool = False) -> Kprobe:
        def before(probe: Kprobe, regs: Registers) -> bool:
            if comm(regs) != "sh":
                return False
            calls.append(name)
            if is_last:
                regs.ax, regs.ip, regs.sp = 5, kernel.read_u64(regs.sp), regs.sp + 8
            return is_last

        return Kprobe(symbol_name="__x64_sys_getppid", pre_handler=before)

    kernel.register_kprobes([named("a"), named("b", is_last=True), named("c")])
    parent = output(kernel, *_PARENT).split()[0]

    assert parent == "5"
    assert calls[:2] == ["c", "b"]
    assert "a" not in calls


def test_handlers_run_before_and_after_any_instruction(kernel: Session, told: list[str]) -> None:
    # A function's instructions one by one: behind each comes the next, unless it is a jump.
    function = kernel.kernel.symbols.named("__x64_sys_getppid")
    steps = Counter[tuple[int, int]]()

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        assert probe.addr is not None
        steps[probe.addr - function.addr, regs.ip - function.addr] += 1

    def before(probe: Kprobe, regs: Registers) -> None:
        assert probe.addr == regs.ip - 1
        if regs.orig_ax != (1 << 64) - 1:
            assert probe.offset in (0, 4)

    probes = probes_on_every_instruction(kernel, function, before, after)
    hits = [probe.hits for probe in probes]
    parent, own = output(kernel, *_PARENT).split()

    assert 0 < int(parent) < int(own)
    assert told == []
    assert [probe.errors for probe in probes] == [0] * len(probes)
    assert [probe.nmissed for probe in probes] == [0] * len(probes)
    assert any(n > m for probe, m in zip(probes, hits, strict=True) for n in [probe.hits])
    inside = {start for start, _ in steps}
    assert all(stop in inside or not 0 <= stop < function.size for _, stop in steps)


def probes_on_every_instruction(
    kernel: Session, function: Symbol, before: Any, after: Any
) -> list[Kprobe]:
    """Register probes wherever one can be."""
    look = kernel.driver.places.look(Wish())
    found: list[Kprobe] = []
    for offset in range(function.size):
        with suppress(DefinitionError, RefusedError):
            look(Addr(function.addr + offset))
            found.append(
                Kprobe(
                    symbol_name=function.name,
                    offset=offset,
                    pre_handler=before,
                    post_handler=after,
                )
            )
    kernel.register_kprobes(found)
    return found


def test_a_register_that_is_changed_in_the_middle_is_what_the_function_goes_on_with(
    kernel: Session,
) -> None:
    # The last instruction before the return: what the function returns is changed there.
    function = kernel.kernel.symbols.named("__x64_sys_getppid")
    last: list[Kprobe] = []

    def after(probe: Kprobe, regs: Registers, flags: int) -> None:
        if not function.addr <= regs.ip < function.addr + function.size and comm(regs) == "sh":
            regs.ax = 999
            last.append(probe)

    probes_on_every_instruction(kernel, function, None, after)
    parent = output(kernel, *_PARENT).split()[0]

    assert parent == "999"
    assert last


def test_registration_is_all_or_nothing(kernel: Session) -> None:
    before = text_of(kernel)
    fine, wrong = (
        Kprobe(symbol_name=name, pre_handler=lambda probe, regs: None)
        for name in ("vfs_open", "vfs_opne")
    )

    with pytest.raises(DefinitionError, match="Invalid probed address or symbol"):
        kernel.register_kprobes([fine, wrong])

    assert (fine.is_registered, kernel.handlers.probes) == (False, ())
    assert text_of(kernel) == before
    with pytest.raises(UsageError, match="names many functions"):
        kernel.register_kprobe(Kprobe(symbol_name="vfs_*", pre_handler=lambda probe, regs: None))


def test_registering_while_others_are_armed_and_recorded_loses_none_of_them(
    kernel: Session,
) -> None:
    hits = Counter[str]()

    def counted(name: str) -> Kprobe:
        def before(probe: Kprobe, regs: Registers) -> None:
            hits[name] += comm(regs) == "cat"

        return Kprobe(symbol_name=name, pre_handler=before)

    kernel.probe("p:open do_sys_openat2 path=+0($arg2):ustring")
    kernel.register_kprobe(counted("vfs_open"))
    with kernel.record() as trace:
        kernel.run(_READ)
        more = kernel.register_kprobe(counted("do_sys_openat2"))
        kernel.run(_READ)
        more.unregister()
        kernel.run(_READ)

    events = [json.loads(line) for line in trace.to_json().splitlines()]
    opened = sum(event["comm"] == "cat" for event in events)
    assert opened == 9
    assert (hits["do_sys_openat2"], hits["vfs_open"]) == (3, 6)


def test_kernel_data_is_written_and_code_is_not(kernel: Session) -> None:
    addr = kernel.address("panic_timeout")
    before = kernel.read(addr, 4)
    assert output(kernel, "cat", "/proc/sys/kernel/panic") == f"{kernel.object('int', addr)}\n"

    kernel.write(addr, (17).to_bytes(4, "little"))

    assert output(kernel, "cat", "/proc/sys/kernel/panic") == "17\n"
    kernel.write(addr, before)
    with pytest.raises(RefusedError, match="is code"):
        kernel.write(kernel.address("vfs_read"), b"\xcc")
    with pytest.raises(MemoryFault, match="read-only"):
        kernel.write(kernel.address("linux_banner"), b"x")
    assert kernel.string(kernel.address("linux_banner")) == output(kernel, "cat", "/proc/version")
    assert kernel.symbol(kernel.address("vfs_read") + 0x1A).startswith("vfs_read+0x1a/0x")


def test_a_wrong_signature_is_answered_with_the_true_one(kernel: Session) -> None:
    def opened(dfd: int, filname: Any) -> None:
        del dfd, filname

    with pytest.raises(UsageError) as caught:
        kernel.entry("do_sys_openat2")(opened)

    assert str(caught.value) == (
        "opened takes filname, which do_sys_openat2 has not: "
        "long int do_sys_openat2(int dfd, const char *filename, struct open_how *how)"
    )


def test_handlers_in_a_module_go_with_it(kernel: Session) -> None:
    devices: list[int] = []
    create = "ip link add d0 type dummy && ip link del d0"

    def setup(probe: Kprobe, regs: Registers) -> None:
        devices.append(regs.args.dev.gso_max_size)

    with pytest.raises(RefusedError, match="dummy is not loaded"):
        kernel.kprobe("dummy:dummy_setup")(setup)
    assert kernel.run("insmod /modules/dummy.ko").status == 0
    probe = kernel.kprobe("dummy:dummy_setup")(setup)
    assert kernel.run(create).status == 0
    found = list(devices)
    assert kernel.run("ip link del dummy0; rmmod dummy").status == 0

    other = kernel.kprobe("__x64_sys_getppid")(_nothing)
    output(kernel, *_PARENT)

    assert found == [65536]
    assert other.hits > 0
    assert (probe.errors, devices) == (0, found)


def test_two_cpus_at_once_are_all_served(kernel: Session) -> None:
    cpus = Counter[int]()

    @kernel.kprobe("__x64_sys_getppid")
    def before(probe: Kprobe, regs: Registers) -> None:
        if comm(regs) == "sh":
            cpus[regs.cpu] += 1

    loop = "i=0; while [ $i -lt 20 ]; do sh -c :; i=$((i+1)); done"
    kernel.run(f"({loop}) & ({loop}) & wait")

    assert before.nmissed == 0
    assert cpus.total() >= 40
