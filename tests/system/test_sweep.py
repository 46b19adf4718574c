"""Wide sweeps, `make sweep`: every instruction of functions that run, and thousands at once.

Within a run of instructions with one way in and one way out each is hit as often as any other.
Only who is inside at the moment of arming or disarming makes a difference: each vCPU, and whoever
was interrupted there, by an interrupt that goes on or another task, before it came to the end.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence

import pytest
from msgspec import Struct

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.model.plan import Strategy
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB, Addr
from tests.build.running import NET_FILES, found_running
from tests.build.sweep import Sweeper, Swept
from tests.build.victim import LOAD_FILES, Home, Load, Witness, settle, witness_of
from tests.build.waiting import wait_until
from tests.system.conftest import STRATEGIES

pytestmark = [pytest.mark.sweep, pytest.mark.arches("amd64", "arm64")]

_log = logging.getLogger(__name__)

FUNCTIONS = int(os.environ.get("KPROBES_SWEEP", "300"))
AT_ONCE = 5_000
SUITES = ("bookworm", "sid")
_EACH_S = 0.3
_ALLOWED = 4
"""Two vCPUs, when arming and when disarming."""


class Scene(Struct, frozen=True, kw_only=True):
    """A guest at work on files, processes and its network, a session with it, and a witness."""

    machine: Machine
    sweeper: Sweeper
    witness: Witness
    load: Load

    def check(self, what: str) -> None:
        """Check that the guest's own results are right, and its text as it was."""
        assert self.load.mistakes() == "", what
        assert self.witness.changes() == [], what

    def net_rounds(self) -> int:
        return int(self.machine.run("cat /tmp/netrounds 2> /dev/null || echo 0", 20).output)


@pytest.fixture(scope="module", params=SUITES)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arch: str
) -> Generator[Scene]:
    home = Home(tmp_path_factory.mktemp("home"))
    options = MachineOptions(suite=request.param, arch=arch, files=LOAD_FILES | NET_FILES)
    with Machine.boot(options) as machine:
        settle(machine)
        load = Load(machine)
        machine.start("sh /net.sh 1000")
        target = str(machine.stub_address)
        # What the first packets flip in the text, they flip before it is looked at.
        assert wait_until(lambda: "\n" in _net(machine)) is not None
        assert load.goes_on()
        witness = witness_of(target, home)
        size = ArenaSize(code=8 * MIB)
        with home.entered(), kprobes.attach(target, size=size) as session:
            yield Scene(machine=machine, sweeper=Sweeper(session), witness=witness, load=load)
        assert witness.changes() == []


def _net(machine: Machine) -> str:
    return machine.run("cat /tmp/netrounds 2> /dev/null", 20).output.decode()


@pytest.mark.parametrize("strategy", [None, Strategy.BREAKPOINT], ids=["auto", "breakpoint"])
def test_every_instruction_of_functions_that_run_is_hit_as_often_as_its_neighbours(
    scene: Scene, strategy: Strategy | None, record_property: Callable[[str, object], None]
) -> None:
    names = found_running(scene.sweeper.session, FUNCTIONS)
    scene.check("entries")
    wrong: list[str] = []
    total: Counter[str] = Counter()
    net = scene.net_rounds()
    for name in names:
        function = scene.sweeper.function(name)
        addrs = scene.sweeper.acceptable(function, strategy)
        if not addrs:
            total["functions without any"] += 1
            continue
        swept = scene.sweeper.count(addrs, strategy, for_s=_EACH_S)
        scene.check(name)
        wrong += scene.sweeper.uneven(function, swept.hits, _ALLOWED) if swept.is_whole else []
        total += _figures(swept)
        _log.info("%s: %s", name, dict(_figures(swept)))
    record_property("figures", dict(total))
    _log.info("%s", dict(total))

    assert wrong == []
    assert len(names) == FUNCTIONS
    assert total["functions with lost hits"] <= FUNCTIONS // 20
    assert total["instructions hit"] > total["instructions"] // 3
    assert scene.net_rounds() > net


@pytest.mark.parametrize("strategy", [None, Strategy.BREAKPOINT], ids=["auto", "breakpoint"])
def test_thousands_of_instructions_at_once_harm_nothing(
    scene: Scene,
    arch: str,
    strategy: Strategy | None,
    record_property: Callable[[str, object], None],
) -> None:
    names = found_running(scene.sweeper.session, 2 * FUNCTIONS)
    rng = random.Random(5)
    chosen = {*_some(scene, names, strategy, AT_ONCE // 2, rng)}
    _add_anywhere(scene, strategy, chosen, rng)
    addrs = rng.sample(sorted(chosen), AT_ONCE)

    swept = scene.sweeper.count(addrs, strategy, for_s=5.0)

    scene.check("at once")
    record_property("figures", dict(_figures(swept)))
    _log.info("%s", dict(_figures(swept)))
    assert swept.counts.damaged == 0
    assert sum(map(bool, swept.hits.values())) > AT_ONCE // 10
    wanted = (strategy,) if strategy else STRATEGIES[arch]
    assert {*wanted} <= set(swept.strategies.values())


def _some(
    scene: Scene,
    names: Sequence[str],
    strategy: Strategy | None,
    count: int,
    rng: random.Random,
) -> list[Addr]:
    functions = [scene.sweeper.function(name) for name in names]
    found = [a for f in functions for a in scene.sweeper.acceptable(f, strategy)]
    return rng.sample(found, min(count, len(found)))


def _add_anywhere(
    scene: Scene, strategy: Strategy | None, chosen: set[Addr], rng: random.Random
) -> None:
    sites = sorted(scene.sweeper.tables.ftrace)
    while len(chosen) < AT_ONCE:
        function = scene.sweeper.function_at(rng.choice(sites))
        if len(function.instructions) < 5_000:
            addrs = scene.sweeper.acceptable(function, strategy)
            chosen.update(rng.sample(addrs, min(len(addrs), 5)))


def _figures(swept: Swept) -> Counter[str]:
    strategies = Counter(swept.strategies.values())
    return Counter(
        {
            "functions": 1,
            "instructions": len(swept.hits),
            "instructions hit": sum(map(bool, swept.hits.values())),
            "hits": sum(swept.hits.values()),
            "lost": swept.counts.lost,
            "missed": sum(swept.counts.missed.values()),
            "functions with lost hits": int(not swept.is_whole),
            **{strategy.value: n for strategy, n in strategies.items()},
        }
    )
