"""x86-64 as one value, and the registry of architectures."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64, code_info
from kprobes.arch.registry import arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import TargetError


def test_x86_64_is_found_by_its_name() -> None:
    assert arch("x86_64") is X86_64


def test_an_unknown_architecture_is_refused_with_those_we_know() -> None:
    with pytest.raises(TargetError, match="'vax' is not supported; known: x86_64"):
        arch("vax")


def test_every_register_can_be_had_by_some_way() -> None:
    code = X86_64.code
    known = {*code.call.parameters, *code.call.saved, *X86_64.constants, "sp", "ip"}

    assert set(X86_64.registers) == known


def test_arguments_come_in_the_order_of_the_abi() -> None:
    assert X86_64.arguments == ("di", "si", "dx", "cx", "r8", "r9")
    assert X86_64.code.call.parameters == X86_64.arguments


def test_every_arm64_register_can_be_had_by_some_way() -> None:
    call = AARCH64.code.call

    assert set(AARCH64.registers) == {*call.saved, *call.aliases, "sp", call.pc}
    assert call.link in call.saved
    assert set(call.computed) <= set(call.saved)


def test_arm64_code_is_made_for_a_kernel_and_its_cpus() -> None:
    code = code_info(is_hypervisor=True, has_lse=True)

    assert "tpidr_el2" in str(code.per_cpu)
    assert code.features.endswith(",+lse")
    assert code_info(is_hypervisor=False, has_lse=False) == AARCH64.code
