"""Return probes on what runs all the time, while everything works, and while the tracer dies.

The longer versions, in `make sweep`: entries and returns of all functions that a load reaches, and
two thousand functions at once for KPROBES_STORM seconds.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import pytest
from msgspec import Struct, field
from msgspec.structs import replace

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.guest.journal import read
from kprobes.guest.places import places_of
from kprobes.guest.text import Prover
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build import hot
from tests.build.balance import STACK, Balance, balance
from tests.build.defined import delete_all, recorded_by_event
from tests.build.dialect import DIALECTS, Dialect
from tests.build.harmed import AGAIN_S
from tests.build.running import NET_FILES, VARIETY_FILES
from tests.build.sweep import Nothing, lasting
from tests.build.victim import (
    LOAD_FILES,
    Home,
    Load,
    Tracer,
    Witness,
    guardians_of,
    settle,
    witness_of,
)
from tests.build.waiting import wait_until

pytestmark = [pytest.mark.guest, pytest.mark.harm, pytest.mark.arches("amd64", "arm64")]

_log = logging.getLogger(__name__)

STORM_S = float(os.environ.get("KPROBES_STORM", "9"))
TWO_MINUTES_S = float(os.environ.get("KPROBES_STORM", "120"))
AT_ONCE = 2_000
_PER_BATCH, _EACH_S = 250, 5.0
_PER_LOOK, _LOOK_S = 5_000, 4.0
SETTLED_S = 40.0
_RETURN_METHODS = (None, ReturnMethod.RETHOOK)
_SIZE = ArenaSize(code=16 * MIB, ring=32 * MIB)


class Scene(Struct, frozen=True, kw_only=True):
    """A guest at work on files, processes and its network, and a witness.

    Attributes:
        reached: functions that ran, each with an entry that can be probed; found when asked for.
    """

    machine: Machine
    home: Home
    witness: Witness
    load: Load
    reached: list[str] = field(default_factory=list[str])

    @property
    def target(self) -> str:
        return str(self.machine.stub_address)

    @property
    def dialect(self) -> Dialect:
        """Its kernel's."""
        return DIALECTS[self.machine.options.arch]

    @contextmanager
    def session(self, return_method: ReturnMethod | None = None) -> Generator[GuestSession]:
        with self.home.entered(), kprobes.attach(self.target, size=_SIZE) as session:
            session.options = replace(session.options, return_method=return_method)
            yield session

    def check(self) -> None:
        """Check that the guest's own results are right, and its text as it was."""
        assert self.witness.changes() == []
        assert self.load.goes_on()
        assert self.load.mistakes() == ""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[Scene]:
    home = Home(tmp_path_factory.mktemp("home"))
    options = MachineOptions(arch=arch, files=LOAD_FILES | NET_FILES | VARIETY_FILES)
    with Machine.boot(options) as machine:
        settle(machine)
        load = Load(machine)
        machine.start("sh /net.sh 1000")
        machine.start("sh /variety.sh 1000")
        # What the first packets flip in the text, they flip before it is looked at.
        assert wait_until(lambda: _has_net(machine)) is not None
        assert load.goes_on()
        witness = witness_of(str(machine.stub_address), home)
        yield Scene(machine=machine, home=home, witness=witness, load=load)


def _has_net(machine: Machine) -> bool:
    return b"\n" in machine.run("cat /tmp/netrounds 2> /dev/null", 20).output


@pytest.fixture(autouse=True)
def _the_guest_is_well_afterwards(scene: Scene) -> Generator[None]:
    yield
    scene.check()


def pairs_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the events of each function: at its entry and at its return."""
    return {name: (f"in{n}", f"out{n}") for n, name in enumerate(names)}


def returning(
    scene: Scene, session: GuestSession, names: Sequence[str], return_method: ReturnMethod | None
) -> list[str]:
    """Return those whose returns can be probed so, and the guest be let alone in time."""
    is_awaited = return_method is ReturnMethod.RETHOOK and scene.dialect.are_addresses_signed
    endless = asleep(scene.machine, session) if is_awaited else set[str]()
    guest = session.driver.guest
    prover = Prover(places_of(guest).text, guest.arch.patch)
    symbols = session.kernel.symbols
    return_methods = {
        name: prover.classify(symbols.named(name)).exits.return_method for name in names
    }
    fine = (
        name
        for name, return_method in return_methods.items()
        if return_method is not ReturnMethod.REFUSED
    )
    return [name for name in fine if name not in endless]


def asleep(machine: Machine, session: GuestSession) -> set[str]:
    """Return the functions in which tasks sleep now, perhaps for good."""
    stacks = machine.run("cat /proc/[0-9]*/stack", 20).output.decode(errors="replace")
    symbols = session.kernel.symbols
    # Stacks are shown without what sleeps for everybody: get_wchan() and its like.
    start, stop = (symbols.named(f"__sched_text_{each}").addr for each in ("start", "end"))
    sleeping = (s.name for s in symbols.glob("*") if start <= s.addr < stop)
    return {*re.findall(r"([\w.]+)\+0x", stacks), *sleeping}


def hot_functions(
    scene: Scene, session: GuestSession, return_method: ReturnMethod | None
) -> list[str]:
    names = [name for name in hot.ALL if scene.witness.is_probeable(name)]
    return returning(scene, session, names, return_method)


def balanced(session: GuestSession, names: Sequence[str], for_s: float) -> list[Balance]:
    """Hold entries and returns of functions against each other, of so many at once as fit."""
    pairs = pairs_of(names)
    delete_all(session)
    lines = [
        f"p:{into} {name} {STACK}\nr:{out} {name} {STACK}" for name, (into, out) in pairs.items()
    ]
    session.probe("\n".join(lines))
    with session.record() as trace:
        time.sleep(for_s)
    counts = trace.counts
    assert (counts.damaged, sum(counts.missed.values()), sum(counts.nmissed.values())) == (0, 0, 0)
    if not counts.lost:
        return [balance(trace.events, pairs)]
    assert len(names) > 1
    middle = len(names) // 2
    parts = (names[:middle], names[middle:])
    return [each for part in parts for each in balanced(session, part, for_s)]


def summed(found: Sequence[Balance]) -> tuple[int, int, int, int]:
    """Return entries, returns, calls begun before, and calls that are not over, of all."""
    return (
        sum(each.entries for each in found),
        sum(each.returns for each in found),
        sum(each.begun_before for each in found),
        sum(each.inside for each in found),
    )


@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_every_entry_of_hot_functions_has_its_return(
    scene: Scene, return_method: ReturnMethod | None, record_property: Callable[[str, object], None]
) -> None:
    with scene.session(return_method) as session:
        names = hot_functions(scene, session, return_method)
        found = balanced(session, names[::2], for_s=STORM_S / 9)

    record_property("entries, returns, begun before, inside", summed(found))
    assert [each.wrong for each in found if each.wrong] == []
    assert len({name for each in found for name in each.reached}) >= 50


@pytest.mark.arches("amd64", "arm64", matrix="arm64")
@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_return_probes_come_and_go_in_a_storm(
    scene: Scene, return_method: ReturnMethod | None
) -> None:
    with scene.session(return_method) as session:
        names = hot_functions(scene, session, return_method)
        session.probe("\n".join(f"r:out{n} {name}" for n, name in enumerate(names)))
        for _ in range(5):
            counts = session.stream(Nothing(), is_done=lasting(STORM_S / 9))

            assert scene.witness.changes() == []
            assert counts.damaged == 0
            assert sum(counts.recorded.values()) > 1000


@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_a_killed_tracers_calls_in_progress_return_to_their_callers(
    scene: Scene, return_method: ReturnMethod | None
) -> None:
    with scene.session() as session:
        names = hot_functions(scene, session, return_method)
    value = scene.dialect.value
    definitions = "\n".join(f"r:out{n} {name} ret=%{value}" for n, name in enumerate(names))

    kill_in_a_storm(scene, definitions, return_method, for_s=1.0)


def kill_in_a_storm(
    scene: Scene, definitions: str, return_method: ReturnMethod | None, for_s: float
) -> None:
    options = ("--code", "16", *(("--returns", return_method) if return_method is not None else ()))
    with Tracer(scene.home, scene.target, definitions, *options) as tracer:
        tracer.wait_for("armed")
        time.sleep(for_s)
        assert scene.witness.changes() != []
        tracer.kill()

        assert wait_until(lambda: _is_well(scene), AGAIN_S) is not None
    # It has its memory back only when no return address and no instance leads there any more.
    assert wait_until(lambda: not guardians_of(scene.target), SETTLED_S) is not None
    for journal in scene.home.journals:
        assert read(journal).is_done
        journal.unlink()
    scene.check()


def _is_well(scene: Scene) -> bool:
    return scene.witness.is_pristine() and scene.witness.runs_within(0.1)


def reached(scene: Scene, session: GuestSession) -> list[str]:
    """Return all functions that the load makes run within seconds."""
    if not scene.reached:
        symbols = [s for s in session.kernel.symbols.glob("*") if s.is_text and not s.module]
        names = sorted({s.name for s in symbols if scene.witness.is_probeable(s.name)})
        for at in range(0, len(names), _PER_LOOK):
            scene.reached.extend(_running(session, names[at : at + _PER_LOOK]))
    return scene.reached


def _running(session: GuestSession, names: Sequence[str]) -> list[str]:
    delete_all(session)
    session.probe("\n".join(f"p:f{n} {name}" for n, name in enumerate(names)))
    session.stream(Nothing(), is_done=lasting(_LOOK_S))
    counts = recorded_by_event(session)
    return [name for n, name in enumerate(names) if counts[f"f{n}"]]


@pytest.mark.sweep
@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_entries_of_two_thousand_functions_equal_returns_and_tasks_inside(
    scene: Scene, return_method: ReturnMethod | None, record_property: Callable[[str, object], None]
) -> None:
    found: list[Balance] = []
    with scene.session(return_method) as session:
        names = returning(scene, session, reached(scene, session), return_method)
        for at in range(0, len(names), _PER_BATCH):
            found += balanced(session, names[at : at + _PER_BATCH], _EACH_S)
            scene.check()

    seen = {name for each in found for name in each.reached}
    entries, returns, begun_before, inside = summed(found)
    record_property("functions, entries, returns", (len(seen), entries, returns))
    _log.info("%d functions: %s", len(seen), summed(found))
    assert [each.wrong for each in found if each.wrong] == []
    assert entries - returns == inside - begun_before
    assert len(seen) >= AT_ONCE


@pytest.mark.sweep
@pytest.mark.parametrize("return_method", _RETURN_METHODS)
def test_two_thousand_functions_at_once_for_two_minutes(
    scene: Scene, return_method: ReturnMethod | None, record_property: Callable[[str, object], None]
) -> None:
    with scene.session(return_method) as session:
        names = returning(scene, session, reached(scene, session), return_method)[:AT_ONCE]
        assert len(names) == AT_ONCE
        lines = [f"r:out{n} {name} ret=%{scene.dialect.value}" for n, name in enumerate(names)]
        delete_all(session)
        session.probe("\n".join(lines))
        counts = session.stream(Nothing(), is_done=lasting(TWO_MINUTES_S))
        returned = sum(count > 0 for count in counts.recorded.values())

    figures = returned, sum(counts.recorded.values()), counts.lost
    record_property("returned, records, lost", figures)
    _log.info("%d functions returned, %d records, %d lost", *figures)
    scene.check()
    assert counts.damaged == 0
    # Not all that a load reaches it reaches every time, and a flood of records may hide one.
    assert returned > AT_ONCE * 0.7

    kill_in_a_storm(scene, "\n".join(lines), return_method, for_s=TWO_MINUTES_S / 4)
