"""A guest at work, and tracers that die at it: it must be well afterwards, within a time."""

import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack

import kprobes
from kprobes.model.plan import Strategy
from kprobes.transport.qemu import Machine
from tests.build import hot
from tests.build.sweep import Sweeper
from tests.build.victim import Home, Load, Tracer, Witness, guardians_of
from tests.build.waiting import wait_until

AGAIN_S = 5.0
"""Within this a guest whose tracer died must run, with its own text: within a second where nothing
else is at work, which no test can know."""
_RECORDS_S = 10.0
"""Within this its ftrace records are as before: what is right there is for who knows its kernel."""
SETTLED_S = 40.0
"""Within this it must have its memory back, and nobody may hold its stub."""
_RETURN_TRAPS = (" unregister_die_notifier+", " iterate_supers_type+")
"""The place that injected calls seem to come from; nothing else in the guest ever does."""
_PATCHED = ("vfs_read", "vfs_write", "schedule", "hrtimer_interrupt", "handle_mm_fault", "dput")
_FIRST: Mapping[str, str] = {"x86_64": "%ax", "aarch64": "%x0"}
ONE = "p:opened vfs_open name=+0(+0($arg1)):string\n"
TRACEPOINTS = "t:sw sched_switch next->pid\nt sys_enter id\nt:out sched_process_exit\n"
FEW = "p vfs_read\np:opened vfs_open name=+0(+0($arg1)):string\np vfs_write n=$arg3\n"


class Scene:
    """A guest at work, its target for tracers, and a witness."""

    def __init__(self, machine: Machine, home: Home, witness: Witness, load: Load) -> None:
        self.machine = machine
        self.target = str(machine.stub_address)
        self.home = home
        self.witness = witness
        self.load = load

    def tracer(self, definitions: str = FEW, *options: str) -> Tracer:
        """Start a tracer."""
        return Tracer(self.home, self.target, definitions, *options)

    def is_well_within(self, timeout_s: float) -> float | None:
        """Return after how long the guest ran with its own text, or None.

        None, too, if its ftrace records do not follow.
        """

        def is_well() -> bool:
            return self.witness.has_its_text() and self.witness.runs_within(0.1)

        took = wait_until(is_well, timeout_s)
        has_followed = wait_until(self.witness.is_pristine, _RECORDS_S) is not None
        return took if has_followed else None

    def is_let_go_within(self, timeout_s: float) -> bool:
        """Whether nobody holds the guest any more."""
        return wait_until(lambda: not guardians_of(self.target), timeout_s) is not None

    def allocated(self) -> list[str]:
        """Return the memory that the guest has allocated: its own list says who asked for it."""
        areas = self.machine.run("cat /proc/vmallocinfo", 20).output.decode().splitlines()
        return [area for area in areas if any(name in area for name in _RETURN_TRAPS)]

    def instructions(self, strategy: str) -> list[str]:
        """Return a probe for each instruction of a few functions that can be probed so."""
        with self.home.entered(), kprobes.attach(self.target) as session:
            sweeper = Sweeper(session)
            functions = [sweeper.function(name) for name in _PATCHED]
            found = [
                addr
                for function in functions
                for addr in sweeper.acceptable(function, Strategy(strategy))
            ]
        first = _FIRST[self.witness.guest.kernel.arch]
        return [f"p:i{n} {addr:#x} a={first} b=+0(%sp)" for n, addr in enumerate(found)]

    def callbacks(self) -> list[int]:
        """Return the guest's chain of callbacks for exceptions, the first first.

        Where no exception comes to us there is no chain to look at.
        """
        if self.witness.guest.arch.patch.trap is None:
            return []
        memory = self.witness.guest.memory
        # struct atomic_notifier_head { spinlock_t lock; struct notifier_block *head; }
        blocks = [memory.u64(self.witness.address("die_chain") + 8)]
        while blocks[-1]:
            assert len(blocks) < 100
            blocks.append(memory.u64(blocks[-1] + 8))
        return blocks

    def hot_probes(self) -> list[str]:
        """Return probes on functions that run all the time."""
        found = hot.definitions(self.witness.is_probeable)
        assert len(found) >= 100
        return found


def fail_everywhere(scene: Scene, point: str, *options: str, definitions: str = FEW) -> int:
    """Run tracers that fail at the n-th of some points until one gets through; return n."""
    code = -signal.SIGKILL if "--interrupt" not in options else 130
    undo = ExitStack()

    def start(number: int) -> Tracer:
        # It loads its modules while the one before is at work.
        words = "--fail", f"{point}:{number}", "--later", *options
        return undo.enter_context(scene.tracer(definitions, *words))

    with undo:
        following = start(0)
        for number in range(100):
            tracer, following = following, start(number + 1)
            for _ in range(3):
                tracer.go_on()
            ended = tracer.wait()
            assert ended in (code, 0), f"{point}:{number}"
            took = scene.is_well_within(AGAIN_S)
            assert took is not None, f"{point}:{number}: {scene.witness.changes()}"
            assert scene.is_let_go_within(SETTLED_S), f"{point}:{number}"
            assert scene.allocated() == [], f"{point}:{number}"
            if ended == 0:
                return number
        raise AssertionError(f"{point}: no end")


def length_of_a_run(scene: Scene) -> float:
    """Return how long a tracer takes from its beginning to its end."""
    with scene.tracer() as tracer:
        tracer.go_on()
        tracer.wait_for("begin")
        start = time.monotonic()
        tracer.wait()
        return time.monotonic() - start
