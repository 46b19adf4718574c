"""Tasks of the emulated guest that call functions whose returns are probed, and sleep in them."""

from collections.abc import Sequence
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from kprobes.model.plan import ReturnMethod, Returns
from kprobes.model.resolved import EntryValue, ExitAddress, RegisterValue
from kprobes.units import Addr
from tests.build.kernel import SITE
from tests.build.machine import KERNEL, STACK, Machine, random_state
from tests.build.returning import CALLERS, Function, return_probe, run

BP = RegisterValue(name="bp")
"""Where the script goes on: another one for every call."""
_SCRIPT_SIZE = 0x100
_CALLERS = 16


class Expected(Struct, frozen=True):
    """What the record of one call must tell."""

    event_id: int
    entered_with: int
    exit: int
    caller: int


class Task(Struct):
    """One stack, and the call that is in progress on it.

    Attributes:
        state: its registers while it sleeps.
        pc: where it goes on, or 0 when nothing is called.
        expected: records that are to come, the last one first.
    """

    number: int
    state: dict[str, int] = field(default_factory=dict[str, int])
    pc: int = 0
    expected: list[Expected] = field(default_factory=list[Expected])


class Calls:
    """Functions that jump to each other, and tasks that call them.

    Attributes:
        died: calls that will never return.
        called: all calls.
    """

    def __init__(
        self, machine: Machine, return_methods: Sequence[ReturnMethod], *, count: int, keeps: bool
    ):
        self.machine = machine
        self.died = self.called = 0
        self.functions = [
            Function(
                machine,
                _returns(number, return_method, keeps=keeps),
                count=count,
                target=SITE + 0x100 * ((number + 1) % len(return_methods)),
            )
            for number, return_method in enumerate(return_methods)
        ]
        for number in range(_CALLERS):
            machine.cpu.add_exit(CALLERS + 16 * number)
        for function in self.functions:
            function.arm()

    def step(self, task: Task, random: Random) -> list[Expected]:
        """Let a task do something; return what must have been recorded at least by then."""
        if not task.pc:
            self._call(task, random)
        elif random.random() < 0.1:
            self.died += len(task.expected)
            task.pc, task.expected = 0, []
            return []
        went, task.state = run(self.machine, task.pc, task.state)
        sleeping = {function.sleep: function.wake for function in self.functions}
        task.pc = sleeping.get(went, 0)
        if task.pc:
            return []
        assert went == task.expected[0].caller
        assert task.state["sp"] == _top(task) + 8
        done, task.expected = task.expected[::-1], []
        return done

    def _call(self, task: Task, random: Random) -> None:
        script = KERNEL + _SCRIPT_SIZE * task.number
        caller = CALLERS + 16 * random.randrange(_CALLERS)
        task.state = random_state(random, sp=_top(task), bp=script)
        self.machine.cpu.set_number(_top(task), caller)
        number = random.randrange(len(self.functions))
        task.pc = self.functions[number].addr
        at = script
        while True:
            function, entered = self.functions[number], at
            if random.random() < 0.4:
                self.machine.cpu.set_number(at, function.sleep)
                at += 8
            is_tail = at < script + 0x80 and random.random() < 0.6
            is_tail &= function.returns.return_method is not ReturnMethod.RETINSN
            left = function.tail.addr if is_tail else function.leave.addr
            self.machine.cpu.set_number(at, left)
            at += 8
            shown = 0 if function.returns.return_method is ReturnMethod.RETHOOK else left
            task.expected.append(Expected(number + 1, entered, shown, caller))
            self.called += 1
            if not is_tail:
                return
            number = (number + 1) % len(self.functions)


def _top(task: Task) -> int:
    return STACK + 0x800 + 0x1F0 * task.number


def _returns(number: int, return_method: ReturnMethod, *, keeps: bool) -> Returns:
    addr = SITE + 0x100 * number
    text = "r f x=$retval b=$arg1" if keeps else "r f x=$retval"
    probe = return_probe(text, event_id=number + 1, addr=addr)
    operands = (ExitAddress(), EntryValue(base=BP))
    fetches = (
        replace(fetch, operand=operand)
        for fetch, operand in zip(probe.fetches, operands, strict=False)
    )
    probe = replace(probe, fetches=tuple(fetches))
    return Returns(
        entry=Addr(addr), return_method=return_method, probes=(probe,), kept=(BP,) if keeps else ()
    )
