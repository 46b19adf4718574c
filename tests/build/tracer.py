"""A tracer to be killed: a process of its own that arms probes and says where it is.

    python -m tests.build.tracer TARGET DEFINITIONS [--cycles N] [--fail POINT:N] [--interrupt]
        [--with-guardian] [--strategy STRATEGY] [--returns WAY] [--asks FUNCTION]
        [--fails FUNCTION] [--sleeps MS] [--later]

Words go to standard output, one JSON object per line. A line of standard input ends a cycle, with
``--later`` one before lets it begin.

It kills itself with SIGKILL at a POINT, ``--with-guardian`` that too, or with ``--interrupt``
raises KeyboardInterrupt there:

    write   before the n-th place is written, by the stub or past it, those before it being written
    record  before (n even) or after (n odd) a group of undos reaches the disk
    begun   before the n-th call of a guest's function, which the journal tells of already
    frees   the same, of those that give something back
    call    in the n-th call of a guest's function, while the guest runs it
    sent    after n bytes of all that is ever sent to the stub, be it in the middle of a packet
"""

import argparse
import errno
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import kprobes
from kprobes.errors import KprobesError
from kprobes.formats.rsp import StopReply
from kprobes.guest import arm, inject
from kprobes.guest.allocations import Allocation, AllocationLog, Call
from kprobes.guest.arena import ArenaSize
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.guest import Code, GuestMemory
from kprobes.guest.journal import Journal
from kprobes.guest.patches import StoppedMemory
from kprobes.guest.places import places_of
from kprobes.model.plan import ReturnMethod, Strategy
from kprobes.model.upcall import Upcall, WaitingVcpu
from kprobes.open import GuestSession
from kprobes.transport.connection import Wire
from kprobes.transport.stub import Stub
from kprobes.units import MIB, Addr
from tests.build.defined import ask

_CALL_S = 0.002
_DEADLINE_S = 10.0
Fail = Callable[[], None]


def main() -> int:
    """Attach, arm, wait, disarm; or die on the way."""
    args = _arguments()
    if args.later:
        sys.stdin.readline()
    if args.fail:
        point, number = args.fail.split(":")
        die = _die_with_guardian if args.with_guardian else _die
        _POINTS[point](int(number), _interrupt if args.interrupt else die)
    print_message("begin")
    try:
        _trace(args)
    except KprobesError as error:
        print_message("error", kind=type(error).__name__, text=str(error), code=error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print_message("interrupted")
        return 130
    print_message("done")
    return 0


def print_message(word: str, **info: object) -> None:
    """Report one thing to the parent."""
    sys.stdout.write(json.dumps({"word": word, **info}) + "\n")
    sys.stdout.flush()


def _trace(args: Any) -> None:
    size = ArenaSize(ring=args.ring or None, code=args.code * MIB)
    with kprobes.attach(args.target, size=size) as session:
        print_message("attached", release=session.kernel.release)
        session.options = replace(
            session.options, strategy=args.strategy, return_method=args.returns
        )
        session.probe(Path(args.definitions).read_text())
        if args.fails:
            session.fail(args.fails, errno=errno.ENOMEM, force=True)
        if args.sleeps:
            print_message("calling")
            session.call("msleep", args.sleeps)
        if args.asks:
            ask(session.driver, _endless(session, args.asks))
        if args.asks_at_return:
            ask(session.driver, at_returns=[_endless(session, args.asks_at_return)])
        for _ in range(args.cycles):
            _cycle(session)


def _cycle(session: GuestSession) -> None:
    with session.record() as trace:
        print_message("armed")
        sys.stdin.readline()
    counts = session.counts()
    print_message(
        "disarmed",
        events=len(trace),
        missed=sum(counts.missed.values()),
        lost=counts.lost,
        damaged=counts.damaged,
    )


def _endless(session: GuestSession, function: str) -> Upcall:
    def serve(vcpu: WaitingVcpu) -> None:
        print_message("waits", cpu=vcpu.cpu)
        time.sleep(3600)

    symbol = session.kernel.symbols.named(function)
    addr = places_of(session.driver.guest).locate(symbol)
    return Upcall(number=0, addr=addr, is_after=False, serve=serve)


def _arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("definitions")
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--fail", default="")
    parser.add_argument("--interrupt", action="store_true")
    parser.add_argument("--with-guardian", action="store_true")
    parser.add_argument("--ring", type=int, default=0)
    parser.add_argument("--code", type=int, default=1, help="MiB for the code of probes")
    parser.add_argument("--asks", default="", help="a function whose hits wait for ever")
    parser.add_argument("--asks-at-return", default="", help="one whose returns wait for ever")
    parser.add_argument("--fails", default="", help="a function whose calls all fail")
    parser.add_argument("--sleeps", type=int, default=0, help="ms that it calls msleep with")
    parser.add_argument("--later", action="store_true", help="begin when it is told to")
    parser.add_argument("--strategy", type=Strategy)
    parser.add_argument("--returns", type=ReturnMethod)
    return parser.parse_args()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_with_guardian() -> None:
    # Of our threads only one has children: that which started the guardian.
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    _die()


def _interrupt() -> None:
    raise KeyboardInterrupt


_INTERRUPTS = range(0xFEE0_0000, 0xFEF0_0000)
"""Intel SDM volume 3, 11.11: a write there is an interrupt, which may wake a CPU of the guest."""


def _fail_at_write(number: int, fail: Fail) -> None:
    write, write_place = Stub.write_physical_many, StoppedMemory.write_physical_many
    left = itertools.count(number, -1)

    def count(addr: int = 0) -> None:
        if addr not in _INTERRUPTS and next(left) == 0:
            fail()

    def some(self: Stub, writes: Sequence[tuple[int, bytes]]) -> None:
        for item in writes:
            count(item[0])
            write(self, [item])

    def some_places(self: StoppedMemory, writes: Sequence[tuple[int, bytes]]) -> None:
        for item in writes:
            if self.is_data(item):
                count()
            write_place(self, [item])

    Stub.write_physical_many = some
    StoppedMemory.write_physical_many = some_places
    _count_new_code(count)


def _count_new_code(count: Callable[[], None]) -> None:
    write = arm.write_new_code

    def some(
        memory: GuestMemory, codes: Iterable[Code], filler: bytes, check: Callable[[], None]
    ) -> list[Code]:
        rest: list[Code] = []
        for code in codes:
            count()
            rest += write(memory, [code], filler, check)
        return rest

    arm.write_new_code = some


def _fail_at_record(number: int, fail: Fail) -> None:
    record = Journal.record
    left = itertools.count(number, -1)

    def told(self: Journal, patches: Sequence[ArmedPatch]) -> None:
        if next(left) == 0:
            fail()
        record(self, patches)
        if next(left) == 0:
            fail()

    Journal.record = told


def _fail_at_beginning(
    number: int, fail: Fail, is_counted: Callable[[Call], bool] = lambda _call: True
) -> None:
    begin = AllocationLog.begin
    left = itertools.count(number, -1)

    def told(self: AllocationLog, call: Call) -> None:
        begin(self, call)
        if is_counted(call) and next(left) == 0:
            fail()

    AllocationLog.begin = told


def _fail_at_result(number: int, fail: Fail) -> None:
    end = AllocationLog.end
    left = itertools.count(number, -1)

    def told(self: AllocationLog, result: int) -> None:
        if next(left) == 0:
            fail()
        end(self, result)
        if next(left) == 0:
            fail()

    AllocationLog.end = told


def _fail_at_freeing(number: int, fail: Fail) -> None:
    _fail_at_beginning(number, fail, lambda call: call.returns is not None)


def _fail_in_call(number: int, fail: Fail) -> None:
    wait, call = Stub.wait, inject.Task.call
    left = itertools.count(number, -1)
    is_it = False

    def counted(
        self: inject.Task,
        function: Addr,
        *args: int,
        allocates: Allocation | None = None,
        returns: Allocation | None = None,
        timeout_s: float = _DEADLINE_S,
        mark: Callable[[int], None] = inject.nothing_of,
    ) -> int:
        nonlocal is_it
        is_it = next(left) == 0
        what = {"allocates": allocates, "returns": returns}
        return call(self, function, *args, **what, timeout_s=timeout_s, mark=mark)

    def told(self: Stub, timeout_s: float) -> StopReply | None:
        nonlocal is_it
        if is_it:
            is_it = False
            time.sleep(_CALL_S)
            fail()
        return wait(self, timeout_s)

    inject.Task.call = counted
    Stub.wait = told


def _fail_when_sent(number: int, fail: Fail) -> None:
    # All that is sent goes through here.
    write: Callable[[Wire, bytes], None] = getattr(Wire, "_write")  # noqa: B009 - private
    left = number

    def some(self: Wire, data: bytes) -> None:
        nonlocal left
        if 0 <= left <= len(data):
            self.sock.sendall(data[:left])
            fail()
        left -= len(data)
        write(self, data)

    setattr(Wire, "_write", some)  # noqa: B010 - private


_POINTS: dict[str, Callable[[int, Fail], None]] = {
    "write": _fail_at_write,
    "record": _fail_at_record,
    "begun": _fail_at_beginning,
    "frees": _fail_at_freeing,
    "result": _fail_at_result,
    "call": _fail_in_call,
    "sent": _fail_when_sent,
}

if __name__ == "__main__":
    sys.exit(main())
