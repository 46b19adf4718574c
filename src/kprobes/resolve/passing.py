"""``$argN`` to what has it when a function is entered, and back: one word for each argument."""

from kprobes.arch.facts import Arch
from kprobes.model.resolved import Operand, RegisterValue, StackValue

_WORD = 8


def at_entry(arch: Arch, number: int) -> RegisterValue | StackValue:
    """Return what has the argument of a number, counted from 1."""
    registers = arch.arguments
    if number <= len(registers):
        return RegisterValue(name=registers[number - 1])
    return StackValue(slot=_first_slot(arch) + number - len(registers) - 1)


def number_of(arch: Arch, operand: Operand) -> int:
    """Return the number of the argument that something has."""
    match operand:
        case RegisterValue(name=name):
            return arch.arguments.index(name) + 1
        case StackValue(slot=slot):
            return len(arch.arguments) + 1 + slot - _first_slot(arch)
        case _:
            raise TypeError(f"{operand} is no argument")


def _first_slot(arch: Arch) -> int:
    # Below it there may be the return address.
    last = arch.passed([_WORD] * (len(arch.arguments) + 1))[-1]
    if last.stack is None:
        raise ValueError(f"{arch.name}: an argument is in {last.registers} and in no ``arguments``")
    return last.stack // _WORD
