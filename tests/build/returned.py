"""Functions that a load makes run and return, found by probing their entries while it runs."""

import threading
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kprobes.guest.places import places_of
from kprobes.guest.text import Prover
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from tests.build import hot
from tests.build.defined import delete_all, recorded_by_event
from tests.build.dialect import DIALECTS
from tests.build.running import matching
from tests.build.sweep import Nothing

LOAD = rb"""#!/bin/sh
cd /tmp
find /bin /etc /dev /proc/1 -name 'k*' > /dev/null 2>&1 &
(for i in 1 2 3 4; do cat /etc/passwd /proc/self/status > /dev/null; done) &
(for i in 1 2 3; do true | cat | head -c 10 | wc -c; done) > /dev/null &
dd if=/dev/zero of=/tmp/zeros bs=4k count=50 2> /dev/null &
dd if=/dev/zero bs=512 count=30 2> /dev/null | cat | gzip | gunzip | wc -c > /dev/null &
(touch a; mkdir d; ln -s a l; mv a d; chmod 600 d/a; sync; ls -lR /tmp; rm -r d l) > /dev/null &
wait
"""
"""A second of work on both CPUs, by tasks that have all ended when it is over."""
_EXITS = ("do_exit", "do_group_exit", *(f"{each.syscall}exit" for each in DIALECTS.values()))
_TRAPPED = ("asm_", "exc_", "sysvec_", *_EXITS)


class Ran(Struct, frozen=True, kw_only=True):
    """A function that ran, how often in one load, and how its returns are probed."""

    name: str
    count: int
    return_method: ReturnMethod
    is_void: bool


def functions_that_return(session: GuestSession, most: int) -> list[Ran]:
    """Return functions that LOAD, at ``/load.sh``, makes run, and no more than so often."""
    names = _probeable(session)
    delete_all(session)
    session.probe("\n".join(f"p:r{n} {name}" for n, name in enumerate(names)))
    counts = counted(session, "sh /load.sh")
    delete_all(session)
    ran = {name: counts[f"r{n}"] for n, name in enumerate(names)}
    return_methods = _ways(session, (name for name, count in ran.items() if 0 < count <= most))
    return [
        Ran(
            name=name,
            count=ran[name],
            return_method=return_methods[name],
            is_void=_is_void(session, name),
        )
        for name in names
        if name in return_methods and return_methods[name] is not ReturnMethod.REFUSED
    ]


def chosen(
    ran: Sequence[Ran], count: int, *, return_method: ReturnMethod | None = None
) -> list[Ran]:
    """Return some of these functions, from all over the kernel; of one way if it is named."""
    fitting = [each for each in ran if return_method in (None, each.return_method)]
    step = max(len(fitting) / count, 1)
    return [fitting[int(n * step)] for n in range(min(count, len(fitting)))]


def counted(session: GuestSession, command: str) -> dict[str, int]:
    """Run a command with what was defined armed, and return how often each event was recorded."""
    worker = threading.Thread(target=lambda: session.run(command, timeout_s=300))
    is_started = False

    def is_done() -> bool:
        nonlocal is_started
        if not is_started:
            is_started = True
            worker.start()
        return not worker.is_alive()

    session.stream(Nothing(), is_done=is_done)
    return recorded_by_event(session)


def _probeable(session: GuestSession) -> list[str]:
    symbols = session.kernel.symbols
    has_site = places_of(session.driver.guest).has_site
    names = dict.fromkeys([*hot.ALL, *matching(session)])
    return [
        name
        for name in names
        if len({s.addr for s in symbols.all_named(name)}) == 1
        and not name.startswith(_TRAPPED)
        and has_site(symbols.named(name))
    ]


def _is_void(session: GuestSession, name: str) -> bool:
    types = session.kernel.types
    prototype = types.function(name) if types is not None else None
    return prototype is not None and prototype.returned == 0


def _ways(session: GuestSession, names: Iterable[str]) -> dict[str, ReturnMethod]:
    places = places_of(session.driver.guest)
    prover = Prover(places.text, session.driver.guest.arch.patch)
    symbols = session.kernel.symbols
    return {name: prover.classify(symbols.named(name)).exits.return_method for name in names}
