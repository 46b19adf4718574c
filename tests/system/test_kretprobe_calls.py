"""Python at returns of calls that go on at once: of several tasks, or one inside another."""

from collections.abc import Generator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes import Kprobe, Kretprobe
from kprobes.errors import RefusedError
from kprobes.handlers.probe import Instance
from kprobes.handlers.registers import Registers
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.system.handling import PARENT, comm, emptied, output
from tests.system.test_kretprobe import RETURN_METHODS, nothing

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_SLEEPERS = "for i in 1 2 3 4 5; do sleep 1.$i & done; wait"
_ALL_ASLEEP = """
for i in 1 2 3 4 5; do sleep 1000 & pids="$pids $!"; done
for p in $pids; do until grep -q '(sleep) S' /proc/$p/stat; do :; done; done
kill $pids; wait; true
"""


@pytest.fixture(scope="module")
def shared(arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        yield session


@pytest.fixture
def kernel(shared: GuestSession) -> Generator[GuestSession]:
    """A guest whose handlers are gone, and whose text is as before, when a test ends."""
    yield from emptied(shared, [])


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_calls_that_sleep_have_their_own_instances(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)
    began: list[int] = []
    ended: list[tuple[int, int]] = []

    def entry(instance: Instance, regs: Registers) -> None:
        instance.pid = regs.task.pid
        began.append(regs.task.pid)

    def handler(instance: Instance, regs: Registers) -> None:
        ended.append((instance.pid, regs.task.pid))

    probe = Kretprobe(symbol_name="do_nanosleep", handler=handler, entry_handler=entry)
    with kernel.register_kretprobe(probe):
        output(kernel, "sh", "-c", _SLEEPERS)

    assert len(began) == len(ended) == 5
    assert [pid for pid, _ in ended] == [pid for _, pid in ended]
    assert sorted(pid for pid, _ in ended) == sorted(began)
    assert (probe.nmissed, probe.maxactive) == (0, 10)


def test_more_calls_at_a_time_than_instances_are_missed(kernel: GuestSession) -> None:
    probe = Kretprobe(symbol_name="do_nanosleep", handler=nothing, data_size=8, maxactive=2)
    every = Kretprobe(symbol_name="do_nanosleep", handler=nothing)
    kernel.register_kretprobes([probe, every])

    output(kernel, "sh", "-c", _ALL_ASLEEP)

    assert (probe.hits, probe.nmissed, len(probe.instances)) == (2, 3, 0)
    assert (every.hits, every.nmissed) == (5, 0)


def test_a_function_inside_itself_keeps_its_calls_apart(kernel: GuestSession) -> None:
    depth, found = [0], list[tuple[int, int]]()

    def entry(instance: Instance, regs: Registers) -> bool:
        if comm(regs) != "ip":
            return True
        depth[0] += 1
        instance.depth = depth[0]
        return False

    def handler(instance: Instance, regs: Registers) -> None:
        found.append((instance.depth, depth[0]))
        depth[0] -= 1

    probe = Kretprobe(symbol_name="vsnprintf", handler=handler, entry_handler=entry)
    with kernel.register_kretprobe(probe):
        # "%s: %pV" of netdev_info() is a vsnprintf() inside of another.
        output(
            kernel, "sh", "-c", "ip link set lo down; ip link set lo name o; ip link set o name lo"
        )

    assert all(mine == now for mine, now in found)
    assert max(depth for depth, _ in found) >= 2
    assert (probe.errors, probe.nmissed) == (0, 0)


def stpcpy_instead(kernel: GuestSession) -> Kprobe:
    """Return a probe that has a shell's getppid() copy a text by stpcpy()."""

    def before(probe: Kprobe, regs: Registers) -> bool:
        if comm(regs) != "sh":
            return False
        regs.si = regs.sp - 2048
        regs.di = regs.si + 64
        kernel.write(regs.si, b"abc\0")
        regs.ip = kernel.address("stpcpy")
        return True

    return Kprobe(symbol_name="__x64_sys_getppid", pre_handler=before)


# Compilers for x86-64 make a jump of it that leaves the function on a condition.
@pytest.mark.arches("amd64")
@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_a_function_that_jumps_to_itself_returns_as_often_and_the_newest_call_first(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)
    found: list[tuple[bytes, int, str]] = []

    def entry(instance: Instance, regs: Registers) -> None:
        instance.data[:] = kernel.read(regs.si, 1)

    def handler(instance: Instance, regs: Registers) -> None:
        # It returns where the text ends that it has written, 64 bytes after the other.
        length = regs.ax - (regs.sp - 8 - 2048 + 64)
        found.append((bytes(instance.data), length, kernel.symbol(regs.ip).split("+")[0]))

    keeping = Kretprobe(symbol_name="stpcpy", handler=handler, entry_handler=entry, data_size=1)
    every = Kretprobe(symbol_name="stpcpy", handler=nothing)
    kernel.register_kretprobes([stpcpy_instead(kernel), keeping, every])
    conditional = any(r.is_conditional for p in kernel.driver.plans for r in p.returning)
    assert conditional == (return_method is None)
    output(kernel, *PARENT)

    # Its loop is a conditional jump to its own entry: one call inside of another for each byte.
    assert [kept for kept, *_ in found[:4]] == [b"\0", b"c", b"b", b"a"]
    assert {each[1:] for each in found} == {(3, found[0][2])}
    assert found[0][2] in ("do_syscall_64", "x64_sys_call")
    assert len(found) == every.hits == keeping.hits
    assert (keeping.errors, keeping.nmissed, len(keeping.instances)) == (0, 0, 0)


@pytest.mark.arches("amd64")
def test_a_handler_on_a_conditional_jump_out_is_refused_while_returns_are_probed(
    kernel: GuestSession,
) -> None:
    kernel.register_kretprobe(Kretprobe(symbol_name="stpcpy", handler=nothing))
    jump = next(
        plan.site.addr
        for plan in kernel.driver.plans
        if any(each.is_conditional for each in plan.returning)
    )

    with pytest.raises(RefusedError, match="is a conditional jump into another function"):
        kernel.register_kprobe(Kprobe(addr=jump, pre_handler=lambda probe, regs: None))

    assert len(kernel.handlers.probes) == 1
