"""Words of arguments at a function's entry: registers and stack."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.model.resolved import Constant, RegisterValue, StackValue
from kprobes.resolve.expression import at_entry, number_of


@pytest.mark.parametrize(
    ("arch", "number", "place"),
    [
        (X86_64, 1, RegisterValue(name="di")),
        (X86_64, 6, RegisterValue(name="r9")),
        # Slot 0 is the return address.
        (X86_64, 7, StackValue(slot=1)),
        (X86_64, 9, StackValue(slot=3)),
        (AARCH64, 1, RegisterValue(name="x0")),
        (AARCH64, 8, RegisterValue(name="x7")),
        # The return address is in x30.
        (AARCH64, 9, StackValue(slot=0)),
        (AARCH64, 11, StackValue(slot=2)),
    ],
)
def test_an_argument_is_in_a_register_or_above_a_return_address(
    arch: Arch, number: int, place: RegisterValue | StackValue
) -> None:
    assert at_entry(arch, number) == place
    assert number_of(arch, place) == number


def test_what_is_no_argument_has_no_number() -> None:
    with pytest.raises(TypeError, match="is not an argument"):
        number_of(AARCH64, Constant(value=1))
