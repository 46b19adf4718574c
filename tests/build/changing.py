"""Random changes of what is recorded, by a process of its own that may be killed in between.

    python -m tests.build.changing TARGET SEED

It says ``armed`` on standard output when it begins to change things, and never ends.
"""

import random
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest

import kprobes
from kprobes.errors import DefinitionError, RefusedError
from kprobes.event_table import TraceProbe
from kprobes.handlers.probe import Kprobe, Kretprobe
from kprobes.open import GuestSession
from tests.build.hot import VFS
from tests.build.module import LOAD, UNLOAD

FORMS = (
    "p:{name} {function}",
    "p:{name} {function} a=$arg1 b=$arg2",
    "p:{name} {function} text=+0($arg1):string",
    "r:{name} {function} $retval",
    "r:{name} {function} a=$arg1 got=$retval",
    "r64:{name} {function} a=$arg1 b=$arg2 c=$arg3",
    "p:{name} {function}+{offset}",
)
MODULE = ["dummy:dummy_xmit", "dummy:dummy_setup", "dummy:dummy_get_stats64"]


class Changes:
    """Random changes of what is recorded."""

    def __init__(
        self, session: GuestSession, seed: int, run: Callable[[str], object] | None = None
    ) -> None:
        """Make none yet.

        Args:
            session: that records.
            seed: of what is random.
            run: runs a command in the guest, which has ``/dummy.ko``; without it no module comes.
        """
        self.random = random.Random(seed)
        self.done = 0
        self._run = run
        self._is_loaded = False
        self._session = session
        self._probes: list[TraceProbe] = []
        self._functions = [
            name for name in VFS.split() if len(session.kernel.symbols.all_named(name)) == 1
        ]
        self._functions += MODULE if run is not None else []

    def make(self) -> None:
        """Make one; what is refused changes nothing."""
        steps: list[Callable[[], None]] = [self._define, self._define, self._handle]
        if self._run is not None:
            steps.append(self._load)
        if self._probes:
            steps += [self._delete, self._disable, self._enable, self._filter]
        with suppress(DefinitionError, RefusedError):
            self.random.choice(steps)()
        self.done += 1

    def _define(self) -> None:
        text = self.random.choice(FORMS).format(
            name=f"e{self.done}",
            function=self.random.choice(self._functions),
            offset=self.random.randrange(4, 64, 4),
        )
        self._probes.append(self._session.probe(text, enabled=self.random.random() < 0.8))

    def _delete(self) -> None:
        probe = self.random.choice(self._probes)
        if probe.is_enabled:
            with pytest.raises(RefusedError, match="Device or resource busy"):
                probe.delete()
            probe.disable()
        probe.delete()
        self._probes.remove(probe)

    def _disable(self) -> None:
        self.random.choice(self._probes).disable()

    def _enable(self) -> None:
        self.random.choice(self._probes).enable()

    def _filter(self) -> None:
        filter_text = self.random.choice(("", "common_pid > 10", 'comm == "cat"', "nothing == 1"))
        self.random.choice(self._probes).set_filter(filter_text)

    def _load(self) -> None:
        assert self._run is not None
        self._run(UNLOAD if self._is_loaded else LOAD)
        self._is_loaded = not self._is_loaded

    def _handle(self) -> None:
        name = self.random.choice(self._functions)
        probes = [
            Kprobe(symbol_name=name, pre_handler=_pass),
            Kretprobe(symbol_name=name, handler=_pass),
        ]
        self._session.register_kprobes(probes)
        self._session.unregister_kprobes(probes)


def _pass(*_: object) -> None:
    pass


def main() -> None:
    """Record, and change what is recorded, until killed."""
    target, seed = sys.argv[1:]
    with kprobes.attach(target) as session:
        changes = Changes(session, int(seed))
        session.probe("p:always vfs_open file=$arg1")
        with session.record():
            sys.stdout.write("armed\n")
            sys.stdout.flush()
            while True:
                changes.make()


if __name__ == "__main__":
    main()
