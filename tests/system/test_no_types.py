"""Guests whose kernels carry no types: what probing must know of tasks is found by its looks."""

import re
from collections.abc import Generator

import pytest
from msgspec import Struct
from msgspec.structs import replace

import kprobes
from kprobes.arch import registry
from kprobes.guest import attach
from kprobes.image.find import FoundKernel
from kprobes.image.task_members import task_members
from kprobes.model.kernel import Types
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.continuous import CALL
from tests.build.defined import delete_all
from tests.build.dialect import DIALECTS
from tests.build.programs import counting_loop
from tests.system.conftest import SUITES
from tests.system.oracle import Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("5.10", "7.x"),
]
TIMES = 1_000
NOT_FOUND = {"7.x": {"task_struct.on_rq"}}
"""It is a byte there, and not before the priorities."""
VERSIONS = {suite: version for version, suite in SUITES.items()}
_OWN = f"events/syscalls/sys_enter_{CALL}"
_HIT = re.compile(rf"^ *(\S.*)-(\d+) +\[\d+\] .*: (?:ours: |sys_{CALL}\()", re.MULTILINE)


class Scene(Struct, frozen=True, kw_only=True):
    """A guest whose kernel's types nobody has found, and these."""

    suite: str
    session: GuestSession
    types: Types


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def scene(request: pytest.FixtureRequest, arch: str) -> Generator[Scene]:
    read_kernel = attach.read_kernel
    hidden: list[Types] = []

    def without_types(*args: object, **kwargs: object) -> FoundKernel:
        found = read_kernel(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        assert found.kernel.types is not None
        hidden.append(found.kernel.types)
        return replace(found, kernel=replace(found.kernel, types=None, module_types={}))

    files = {"/loop": counting_loop(CALL, TIMES, arch=arch)}
    options = MachineOptions(suite=request.param, arch=arch, files=files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "read_kernel", without_types)
        with kprobes.boot(options) as session:
            session.run("chmod 755 /loop")
            yield Scene(suite=request.param, session=session, types=hidden[-1])


def test_members_are_where_the_types_say(scene: Scene) -> None:
    guest = scene.session.driver.guest
    with guest.stub.paused():
        found = task_members(
            guest.memory, guest.kernel, registry.machine(guest.kernel.arch), guest.arch.thread_size
        )

    assert guest.kernel.types is None
    assert found == {path: scene.types.offset(*path.split(".", 1)) for path in found}
    optional = {f"task_struct.{name}" for name in ("on_rq", "stack_canary", "self_exec_id")}
    absent = optional - set(found)
    assert absent == NOT_FOUND.get(VERSIONS[scene.suite], set())


def test_events_are_those_of_the_guests_own_tracepoint(scene: Scene, arch: str) -> None:
    # While it has kprobes of its own, and what these look like is not known, others are refused.
    session, files = scene.session, Tracefs(scene.session)
    function = f"{DIALECTS[arch].syscall}{CALL}"
    delete_all(session)
    files.run(f"echo 1 > {_OWN}/enable; : > trace; echo 1024 > buffer_size_kb")
    session.probe(f"p:ours {function} first=$arg1\nr:back {function} ret=$retval")

    with session.record() as trace:
        assert session.run("/loop & /loop & wait").status == 0

    native = _HIT.findall(files.run(f"cat trace; echo 0 > {_OWN}/enable"))
    ours = _HIT.findall(trace.to_text())
    assert sorted(ours) == sorted(native)
    assert len(ours) == len(trace.columns("back")["ret"]) == 2 * TIMES
    assert trace.counts.lost == trace.counts.damaged == 0


def test_a_command_is_followed_and_probes_in_use_are_taken_away(scene: Scene) -> None:
    session = scene.session
    delete_all(session)
    session.probe("p:slept do_nanosleep\nr:woke do_nanosleep")
    session.choose_tasks(follow=True)
    machine = session.machine
    assert machine is not None
    other = machine.start("while :; do sleep 0.01; done")

    with session.record() as trace:
        session.run("sh -c 'sleep 0.1; sleep 0.1'")
    other.kill()
    other.wait(60)
    session.choose_tasks()
    delete_all(session)

    assert len(trace.columns("slept")["pid"]) == len(trace.columns("woke")["pid"]) == 2
    assert session.run("dmesg | grep -E 'BUG:|WARNING:|Oops'").output == b""
