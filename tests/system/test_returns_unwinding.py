"""The guest's own stack dumps of tasks that are inside probed functions."""

import re
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all
from tests.build.dialect import dialect_of

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_PROBED = "hrtimer_nanosleep"
_DUMP = """
echo 1 > /proc/sys/kernel/printk; dmesg -c > /dev/null
echo t > /proc/sysrq-trigger; dmesg
"""
_FRAME = re.compile(r"(?P<guess>\? )?(?P<name>[\w.]+)\+0x\w+/0x\w+|(?P<unknown>0x[0-9a-f]{16})")
_UNKNOWN = "unknown"


@pytest.fixture(scope="module", params=["bookworm", "bookworm-backports"])
def session(request: pytest.FixtureRequest, arch: str) -> Iterator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch, suite=request.param)) as booted:
        yield booted


@contextmanager
def asleep(session: GuestSession) -> Generator[int]:
    """Have a task sleep, and return its pid when it does."""
    script = (
        "sleep 1000 & p=$!; until grep -q nanosleep /proc/$p/stack; do usleep 9000; done; echo $p"
    )
    pid = int(session.run(script, timeout_s=180).output)
    try:
        yield pid
    finally:
        session.run(f"kill -9 {pid}; while [ -e /proc/{pid} ]; do usleep 9000; done", timeout_s=180)


@contextmanager
def probed(
    session: GuestSession, return_method: ReturnMethod | None, *, duration: bool = False
) -> Generator[None]:
    session.options = replace(session.options, return_method=return_method)
    delete_all(session)
    session.probe(f"r:out {_PROBED} ret=$retval", duration=duration)
    with session.record():
        yield


def stack_of(session: GuestSession, pid: int) -> list[str]:
    """Return the functions on a sleeping task's stack, as /proc tells."""
    return _names(session.run(f"cat /proc/{pid}/stack", timeout_s=180).output.decode())


def dumped(session: GuestSession, pid: int) -> list[str]:
    """Return the functions that sysrq shows of a task, without those that it guesses."""
    text = session.run(_DUMP, timeout_s=180).output.decode(errors="replace")
    (mine,) = re.findall(rf"task:sleep +state:S.* pid:{pid} .*\n(?:(?!.*task:).*\n)*", text)
    return _names(re.split("Call [Tt]race:", mine)[1].partition("</TASK>")[0])


def _names(text: str) -> list[str]:
    frames = [found for line in text.splitlines() if (found := _FRAME.search(line)) is not None]
    return [found["name"] or _UNKNOWN for found in frames if not found["guess"]]


@pytest.mark.parametrize("duration", [False, True])
def test_a_task_inside_a_function_that_is_probed_at_its_returns_has_a_true_stack(
    session: GuestSession, duration: bool
) -> None:
    with asleep(session) as pid:
        plain = stack_of(session, pid), dumped(session, pid)
    with probed(session, None, duration=duration), asleep(session) as pid:
        seen = stack_of(session, pid), dumped(session, pid)

    assert _PROBED in plain[0]
    assert len(plain[0]) >= 4
    assert plain[1][-len(plain[0]) :] == plain[0]
    assert seen == plain


def test_a_taken_over_call_hides_its_callers_while_its_return_address_is_ours(
    session: GuestSession,
) -> None:
    is_signed = dialect_of(session).are_addresses_signed
    with ExitStack() as undo:
        with probed(session, ReturnMethod.RETHOOK):
            pid = undo.enter_context(asleep(session))
            during = stack_of(session, pid), dumped(session, pid)
        after = stack_of(session, pid), dumped(session, pid)
    with asleep(session) as pid:
        plain = stack_of(session, pid), dumped(session, pid)

    for hidden, true in zip(during, plain, strict=True):
        at = true.index(_PROBED) + 1
        assert hidden[:at] == true[:at]
        # By frame pointers all are found but the caller itself.
        expected = [[_UNKNOWN, *true[at + 1 :]]] if is_signed else [[], [_UNKNOWN]]
        assert hidden[at:] in expected
    # What is signed cannot be given back before it has returned.
    assert after == (during if is_signed else plain)
