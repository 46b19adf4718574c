import pytest

from kprobes.arch.x86_64.registers import NAMES
from kprobes.lang.fetch import near_register


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rdi", "di"),
        ("edi", "di"),
        ("DI", "di"),
        ("RAX", "ax"),
        ("r8d", "r8"),
        ("al", "ax"),
        ("dil", "di"),
        ("rip", "ip"),
        ("eflags", "flags"),
        ("orig_rax", "orig_ax"),
    ],
)
def test_the_assemblers_names_lead_to_the_kernels(name: str, meant: str) -> None:
    assert near_register(name, NAMES) == f"did you mean %{meant}?"


@pytest.mark.parametrize("name", ["", "zz"])
def test_a_name_like_no_other_lists_them_all(name: str) -> None:
    assert near_register(name, ("di", "si")) == "registers: di si"
