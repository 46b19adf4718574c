"""Probes of the emulated guest with triggers, and in plain Python what these do."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.lang.filter import parse_filter
from kprobes.lang.parser import parse
from kprobes.lang.trigger import parse_trigger
from kprobes.model.abi import WALK_STACK
from kprobes.model.definition import SyntheticFields
from kprobes.model.resolved import Resolved
from kprobes.model.trigger import Command, CompiledTrigger, Trigger
from kprobes.resolve.resolve import resolve
from kprobes.units import U64, Addr
from tests.build import arm64, kernel, machine
from tests.build.arm64 import Arm64Machine
from tests.build.filtered import known_of
from tests.build.kernel import make_kernel, symbol
from tests.build.machine import Machine
from tests.build.overridden import ARM64, Isa

_SPACING = 0x100
_WORDS = 0x1_0000
"""Of the data: between the counters of events that no test has."""
_TRACING, _STOPPED, _SNAPSHOTS, _SOFT_ENABLES, _LEFT = 0, 8, 16, 64, 64 + 8 * 252
_IS_THERE = _LEFT + 8 * 252
"""As the page is drawn in ``model.trigger``."""


class Event(Struct, frozen=True, kw_only=True):
    """An event on a function of its own.

    Attributes:
        probe: with its triggers.
        least: of its first argument for a hit to pass its filter, or 0.
        leasts: the same of each trigger.
    """

    probe: Resolved
    least: int
    leasts: Sequence[int]


def make_event(
    isa: Isa,
    number: int,
    triggers: Sequence[tuple[str, int]] = (),
    *,
    least: int = 0,
    soft_enable: int = 0,
    targets: Mapping[str, int] | None = None,
    text: str = "p f a=$arg1",
) -> Event:
    """Return event ``number``, ``a`` its first argument.

    Args:
        isa: of the guest.
        number: from 0 on; its triggers have the numbers from 10 times that on.
        triggers: without their filter, and what ``a`` must be at least.
        least: what ``a`` must be for a hit to be recorded.
        soft_enable: of the event.
        targets: the soft_enables of events, as triggers name them.
        text: of its definition.
    """
    names = [symbol("f", _site(isa, number)), symbol(WALK_STACK, kernel.TEXT)]
    found = [parse_trigger(text).trigger for text, _ in triggers]
    has_stack = any(each.command is Command.STACKTRACE for each in found)
    fields = SyntheticFields(stacktrace=has_stack, is_stack_triggered=has_stack)
    definition = parse(text, registers=isa.arch.registers)
    probe = resolve(
        replace(definition, synthetic_fields=fields),
        replace(make_kernel(names), arch=isa.arch.name),
        isa.arch,
        event_id=number + 1,
        locate=lambda function: function.addr,
    )
    compiled: list[CompiledTrigger] = []
    for at, (each, (_, low)) in enumerate(zip(found, triggers, strict=True), 1):
        # Two steps: not every hit that comes out has passed the second.
        text = f"common_type != 77 && a >= {low}" if low else ""
        target = (targets or {}).get(each.target, 0)
        trigger = replace(each, number=10 * number + at, soft_enable=target, filter=text)
        looking = parse_filter(text, known_of(probe)) if text else None
        compiled.append(CompiledTrigger(trigger=trigger, filter=looking))
    chosen = parse_filter(f"a >= {least}", known_of(probe)) if least else None
    probe = replace(probe, triggers=tuple(compiled), soft_enable=soft_enable, filter=chosen)
    return Event(probe=probe, least=least, leasts=[low for _, low in triggers])


def _site(isa: Isa, number: int) -> int:
    return (arm64.SITE if isa is ARM64 else kernel.SITE) + _SPACING * number


class Words(Struct, kw_only=True):
    """What the page says.

    Attributes:
        soft_enables: by their numbers.
        left: likewise of triggers with a count.
        gone: the numbers of triggers that were taken away.
    """

    tracing: int = 1
    stopped: int = 0
    snapshots: int = 0
    soft_enables: dict[int, int] = field(default_factory=dict[int, int])
    left: dict[int, int] = field(default_factory=dict[int, int])
    gone: frozenset[int] = frozenset()


class Model:
    """What hits do, in plain Python.

    Attributes:
        words: as they are now.
        recorded: the events in a row: number of the event, argument, and whether with a stack.
    """

    def __init__(self, words: Words) -> None:
        self.words = words
        self.recorded: list[tuple[int, int, bool]] = []

    def hit(self, event: Event, argument: int) -> None:
        """Do what a hit does; trace_trigger_soft_disabled() and trace_event_buffer_commit()."""
        triggers = [each.trigger for each in event.probe.triggers]
        passing = [
            trigger
            for trigger, least in zip(triggers, event.leasts, strict=True)
            if argument >= least and trigger.number not in self.words.gone
        ]
        looks = any(each.is_post for each in triggers) or any(event.leasts)
        was_tracing = self.words.tracing
        for each in passing:
            if not each.is_post:
                self._do(each)
        is_tracing = was_tracing if looks else self.words.tracing
        is_on = self.words.soft_enables.get(event.probe.soft_enable, 1)
        if is_tracing and is_on and argument >= event.least:
            stacks = [each for each in passing if each.command is Command.STACKTRACE]
            has_stack = max(map(self._take, stacks), default=False)
            self.recorded.append((event.probe.layout.event_id, argument, has_stack))
        for each in passing:
            if each.command in (Command.TRACEOFF, Command.STOP):
                self._do(each)

    def _do(self, trigger: Trigger) -> None:
        words = self.words
        is_on = trigger.command in (Command.TRACEON, Command.ENABLE_EVENT)
        match trigger.command:
            case Command.TRACEON | Command.TRACEOFF:
                if words.tracing != is_on and self._take(trigger):
                    words.tracing = int(is_on)
            case Command.ENABLE_EVENT | Command.DISABLE_EVENT:
                if words.soft_enables[trigger.soft_enable] != is_on and self._take(trigger):
                    words.soft_enables[trigger.soft_enable] = int(is_on)
            case _ if self._take(trigger):
                if trigger.command is Command.STOP:
                    words.tracing, words.stopped = 0, 1
                else:
                    words.snapshots += 1
            case _:
                pass

    def _take(self, trigger: Trigger) -> bool:
        if trigger.count is None:
            return True
        left = self.words.left[trigger.number]
        self.words.left[trigger.number] = max(left - 1, 0)
        return left > 0


class Triggered:
    """A guest whose events have triggers, on both CPUs.

    Attributes:
        machine: that it is.
        model: what it should do.
    """

    def __init__(
        self,
        isa: Isa,
        events: Sequence[Event],
        words: Words,
        *,
        seed: int = 0,
        reads: bool = False,
    ) -> None:
        """Arm events; with ``reads`` arguments are where a pointer leads to."""
        self._place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
        self._reads = reads
        data, abi = (arm64.DATA, arm64.ABI) if isa is ARM64 else (machine.DATA, machine.ABI)
        self._page, self._isa, self._random = data + _WORDS, isa, Random(seed)
        abi = replace(abi, words=Addr(self._page), checks_tracing_on=True)
        self.machine: Machine | Arm64Machine = Arm64Machine(abi) if isa is ARM64 else Machine(abi)
        self.machine.readers.stack = [kernel.TEXT]
        self._events = {id(each): self.machine.load([each.probe]) for each in events}
        self.model = Model(words)
        numbers = {each.trigger.number: each.trigger for e in events for each in e.probe.triggers}
        words.left = {n: each.count for n, each in numbers.items() if each.count is not None}
        self._numbers = set(numbers)
        self._write(words)

    def hit(self, event: Event, argument: int) -> None:
        """Have an event hit with an argument, in both."""
        self.model.hit(event, argument)
        state = self._random_state()
        state[self._isa.given[0]] = self._place if self._reads else argument
        if self._reads:
            self.machine.cpu.set_number(self._place, argument)
        self.machine.hit(self._events[id(event)], state)  # pyright: ignore[reportArgumentType] - of its kind

    def words(self) -> Words:
        """Return what the page says, of those words that the model has."""
        number = self._number
        return Words(
            tracing=number(_TRACING),
            stopped=number(_STOPPED),
            snapshots=number(_SNAPSHOTS),
            soft_enables={n: number(_SOFT_ENABLES + 8 * n) for n in self.model.words.soft_enables},
            left={n: number(_LEFT + 8 * n) for n in self.model.words.left},
            gone=frozenset(n for n in self._numbers if not number(_IS_THERE + 8 * n)),
        )

    def word(self, offset: int) -> int:
        """Return a word of the page, which the model may not have."""
        return self._number(offset)

    def set_word(self, offset: int, number: int) -> None:
        """Write one."""
        self.machine.cpu.set_number(self._page + offset, number)

    def _random_state(self) -> dict[str, int]:
        make: Callable[[Random], dict[str, int]]
        make = arm64.random_state if self._isa is ARM64 else machine.random_state
        return make(self._random)

    def _number(self, offset: int) -> int:
        return self.machine.cpu.number(self._page + offset)

    def _write(self, words: Words) -> None:
        self.machine.cpu.write(self._page, bytes(8192))
        found = {_TRACING: words.tracing, _STOPPED: words.stopped, _SNAPSHOTS: words.snapshots}
        found |= {_SOFT_ENABLES + 8 * n: value for n, value in words.soft_enables.items()}
        found |= {_LEFT + 8 * n: value for n, value in words.left.items()}
        found |= {_IS_THERE + 8 * n: 1 for n in self._numbers - words.gone}
        for offset, value in found.items():
            self.machine.cpu.set_number(self._page + offset, value & U64)
