"""A function that calls itself: entries and returns are the kernel's own, in their order."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all
from tests.build.dialect import dialect_of
from tests.build.programs import nested_epolls
from tests.system import oracle
from tests.system.oracle import Hit, Tracefs

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_DEPTH = 5
"""One more, and the kernel says that they are too many."""
_FUNCTION = "ep_loop_check_proc"
_RETURNED = f"r:out {_FUNCTION} ret=$retval:s32"
_KEPT = f"r:out {_FUNCTION} depth=$arg2:u32"
_RETURN_METHODS = (None, ReturnMethod.RETHOOK)


@pytest.fixture(scope="module")
def session(arch: str) -> Iterator[GuestSession]:
    options = MachineOptions(arch=arch, files={"/nest": nested_epolls(_DEPTH, arch=arch)})
    with kprobes.boot(options) as booted:
        booted.run("chmod 755 /nest")
        yield booted


def entered(session: GuestSession) -> str:
    depth = dialect_of(session).arguments[1]
    return f"p:in {_FUNCTION} depth=%{depth}:u32"


@pytest.fixture(scope="module")
def native(session: GuestSession) -> list[Hit]:
    """What the kernel's own probes record, with the same fields."""
    files = Tracefs(session)
    files.arm((entered(session), _RETURNED), buffer_kib=64)
    session.run("/nest")
    text = files.read()
    files.disarm()
    fields = {"in": [("depth", r"\d+")], "out": [("ret", r"-?\d+")]}
    return of_program(oracle.native_hits(text, fields))


def ours(session: GuestSession, returned: str, return_method: ReturnMethod | None) -> list[Hit]:
    session.options = replace(session.options, return_method=return_method)
    delete_all(session)
    session.probe(f"{entered(session)}\n{returned}")
    with session.record() as trace:
        session.run("/nest")
    assert sum(trace.counts.nmissed.values()) + sum(trace.counts.missed.values()) == 0
    return of_program(oracle.our_hits(trace))


def of_program(hits: list[Hit]) -> list[Hit]:
    return [hit for hit in hits if hit.comm == "nest"]


def told(hits: list[Hit]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(hit.event, hit.where, hit.values) for hit in hits]


def test_the_kernel_s_own_probes_see_calls_inside_of_calls(native: list[Hit]) -> None:
    depths = [hit.values for hit in native if hit.event == "in"]

    # As deep as each was nested when it was added.
    assert depths == [(str(depth),) for top in range(1, _DEPTH + 1) for depth in range(top)]
    assert len(native) == 2 * len(depths)


@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_calls_inside_of_calls_are_the_kernel_s_with_their_callers(
    session: GuestSession, native: list[Hit], return_method: ReturnMethod | None
) -> None:
    assert told(ours(session, _RETURNED, return_method)) == told(native)


@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_each_return_knows_the_argument_of_its_own_call(
    session: GuestSession, return_method: ReturnMethod | None
) -> None:
    hits = ours(session, _KEPT, return_method)

    open_calls: list[tuple[str, ...]] = []
    for hit in hits:
        if hit.event == "in":
            open_calls.append(hit.values)
        else:
            assert hit.values == open_calls.pop()
    assert (len(hits), open_calls) == (_DEPTH * (_DEPTH + 1), [])
