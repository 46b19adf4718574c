"""Returns that the kernel's own probes miss, or that never come: ours are all there.

The kernel keeps a number of instances for each of its return probes, ten here, and misses the
return of a call that finds none free.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.model.events import Batch, Counts
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.balance import STACK, Balance, balance
from tests.build.defined import delete_all
from tests.build.dialect import dialect_of
from tests.build.programs import counting_loop
from tests.system.oracle import Tracefs

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_TASKS = 64
_CALL = "sched_get_priority_min"
"""A system call that nobody else in the guest makes."""
_LOOPS, _TIMES, _MANY = 4, 100_000, 500_000
_ASLEEP = {
    "do_nanosleep": ("sleep", "sleep 1000"),
    "pipe_read": ("cat", "sleep 1000 | cat"),
    "do_wait": ("sh", "sh -c 'sleep 1000; true'"),
}
"""By function, what sleeps in it, and what starts it."""
_ALL_ASLEEP = f"""
for n in $(seq {_TASKS}); do {{}} & done
until [ $(cat /proc/[0-9]*/stat 2>/dev/null | grep -c '({{}}) S') -ge {_TASKS} ]; do :; done
killall sleep; wait; true
"""
_ALL_AT_ONCE = f"for n in $(seq {_TASKS}); do {{}} & done; wait"
_LOOP = f"for n in $(seq {_LOOPS}); do /{{}} & done; wait"
_KILLED = """
for n in $(seq 64); do sleep 1000 & pids="$pids $!"; done
for p in $pids; do until grep -q '(sleep) S' /proc/$p/stat; do usleep 9000; done; done
kill -9 $pids; wait
"""
_SIGNALS = """
trap 'echo got >> /tmp/got' USR1
for n in $(seq 20); do kill -USR1 $$; done
"""
_ABROAD = ("schedule", "kernel_clone", "do_wait", "copy_process", "finish_task_switch.isra.0")
_FORKS = "for n in $(seq 50); do (true); true | cat | cat; done"


@pytest.fixture(scope="module")
def session(arch: str) -> Iterator[GuestSession]:
    times = {"/loop": _TIMES, "/many": _MANY}
    files = {name: counting_loop(_CALL, count, arch=arch) for name, count in times.items()}
    options = MachineOptions(arch=arch, files=files)
    with kprobes.boot(options, size=ArenaSize(ring=32 * MIB)) as booted:
        booted.run("chmod 755 /loop /many; echo 0 > /sys/kernel/tracing/tracing_on")
        yield booted


@pytest.fixture(autouse=True)
def _the_guest_is_well_afterwards(session: GuestSession) -> Iterator[None]:
    yield
    session.options = replace(session.options, return_method=None)
    dmesg = session.run("dmesg").output.decode(errors="replace")
    assert not any(word in dmesg for word in ("BUG:", "WARNING:", "Oops", "lockup"))


def around(session: GuestSession, *functions: str) -> list[str]:
    """Return a probe at the entry and at the return of each function."""
    value = dialect_of(session).value
    pairs = [
        (f"p:in_{n} {name} {STACK}", f"r:out_{n} {name} {STACK} ret=%{value}:x64")
        for n, name in enumerate(functions)
    ]
    return [line for pair in pairs for line in pair]


def record(
    session: GuestSession,
    lines: list[str],
    script: str,
    return_method: ReturnMethod | None = None,
    *,
    duration: bool = False,
) -> Trace:
    session.options = replace(session.options, return_method=return_method)
    delete_all(session)
    session.probe("\n".join(lines), duration=duration)
    with session.record() as trace:
        assert session.run(script, timeout_s=180).status == 0
    counts = counts_of(trace)
    assert (counts.lost, counts.damaged, sum(counts.missed.values())) == (0, 0, 0)
    return trace


def counts_of(trace: Trace) -> Counts:
    return trace.counts


def balanced(trace: Trace, *functions: str) -> Balance:
    pairs = {name: (f"in_{n}", f"out_{n}") for n, name in enumerate(functions)}
    found = balance(trace.events, pairs)
    assert found.wrong == ()
    assert sum(counts_of(trace).nmissed.values()) == 0
    return found


@pytest.mark.parametrize("function", _ASLEEP)
def test_what_64_sleeping_tasks_return_the_kernel_misses_and_we_do_not(
    session: GuestSession, function: str, record_property: Callable[[str, object], None]
) -> None:
    files = Tracefs(session)
    files.arm([f"r:own {function}"], buffer_kib=1024)

    name, command = _ASLEEP[function]
    trace = record(session, around(session, function), _ALL_ASLEEP.format(command, name))

    native = files.read()
    missed = files.misses()["own"]
    files.disarm()
    seen = sum(": own: " in line for line in native.text.splitlines())
    found = balanced(trace, function)
    record_property("native", (seen, missed))
    assert found.entries - found.inside >= _TASKS
    assert found.returns == found.entries + found.begun_before - found.inside
    # How many are missed at all depends on how quickly the tasks begin.
    assert seen <= found.returns - _TASKS // 2
    assert missed >= _TASKS // 2


def test_tasks_that_sleep_are_timed_each(session: GuestSession) -> None:
    script = _ALL_AT_ONCE.format("sleep 2")

    trace = record(session, around(session, "do_nanosleep"), script, duration=True)

    found = balanced(trace, "do_nanosleep")
    durations = [ns for batch in _batches(trace, "out_0") for ns in batch.values[-1].tolist()]
    assert len(durations) == found.returns
    assert sum(1.9e9 < each < 60e9 for each in durations) >= _TASKS


@pytest.mark.parametrize("return_method", [None, ReturnMethod.RETHOOK])
def test_entries_and_returns_balance_on_both_cpus(
    session: GuestSession, return_method: ReturnMethod | None
) -> None:
    check_balance(session, "loop", _TIMES, return_method)


@pytest.mark.sweep
@pytest.mark.parametrize("return_method", [None, ReturnMethod.RETHOOK])
def test_millions_of_entries_and_returns_balance(
    session: GuestSession, return_method: ReturnMethod | None
) -> None:
    check_balance(session, "many", _MANY, return_method)


def check_balance(
    session: GuestSession, program: str, times: int, return_method: ReturnMethod | None
) -> None:
    function = f"{dialect_of(session).syscall}{_CALL}"

    trace = record(session, around(session, function), _LOOP.format(program), return_method)

    found = balanced(trace, function)
    assert (found.entries, found.returns) == (_LOOPS * times, _LOOPS * times)
    assert {cpu for batch in _batches(trace, "out_0") for cpu in set(batch.cpu.tolist())} == {0, 1}


def _batches(trace: Trace, event: str) -> list[Batch]:
    return [b for events in trace.events for b in events.batches if b.layout.event == event]


@pytest.mark.parametrize("return_method", [None, ReturnMethod.RETHOOK])
def test_tasks_killed_in_their_sleep_return_before_they_die(
    session: GuestSession, return_method: ReturnMethod | None
) -> None:
    maxactive = [line.replace("r:", "r128:") for line in around(session, "do_nanosleep")]

    trace = record(session, maxactive, _KILLED, return_method)

    found = balanced(trace, "do_nanosleep")
    assert found.returns >= _TASKS
    assert found.inside == 0


def test_what_tasks_die_in_is_probed_on_and_on(session: GuestSession) -> None:
    # get_signal() never comes back to a task that is killed: four times as many as it may keep.
    lines = ["r16:out get_signal ret=$retval:u8"]
    scripts = [_KILLED, "sleep 1", _SIGNALS]

    trace = record(session, lines, "\n".join(scripts), ReturnMethod.RETHOOK)

    # The table was full, and had room again.
    assert sum(counts_of(trace).nmissed.values()) > 0
    caught = [batch.comm[batch.values[0] != 0] for batch in _batches(trace, "out")]
    assert sum(map(len, caught)) >= 20


@pytest.mark.parametrize("return_method", [None, ReturnMethod.RETHOOK])
def test_functions_that_return_in_another_context_balance(
    session: GuestSession, return_method: ReturnMethod | None
) -> None:
    names = _ABROAD
    if return_method is ReturnMethod.RETHOOK and dialect_of(session).are_addresses_signed:
        # Tasks that sleep in it for good would have to be waited for.
        names = tuple(name for name in names if name != "schedule")
    lines = [line.replace("r:", "r128:") for line in around(session, *names)]

    trace = record(session, lines, _FORKS, return_method)

    found = balanced(trace, *names)
    assert found.reached == set(names)
    assert found.returns > 500


def test_the_schedulers_heart_returns_to_whom_it_left(session: GuestSession) -> None:
    # It has no entry site; its own kernel refuses it, too.
    caller = f"caller=%{dialect_of(session).pc}:symbol"

    trace = record(session, [f"r:out_0 __schedule {caller}"], _FORKS)

    callers = Counter(
        str(line).partition("(")[2].partition("+")[0]
        for line in trace.to_text().splitlines()
        if "out_0:" in line
    )
    assert len(trace) > 500
    assert {"schedule"} <= set(callers)
