"""Bytes before our callback, on an emulated CPU: each form of check lets its caller through.

The forms are those of arch/x86/kernel/alternative.c from 6.2 to 6.17, and clang's.
"""

import pytest
from unicorn.unicorn import UcError

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.arch.x86_64 import cfi
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart
from kprobes.units import Addr
from tests.build.cpu import Cpu

CALLER, CALLBACK = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_C000_0100
STACK, RETURN = 0xFFFF_C900_0000_0800, CALLER + 0x800
HASH = 0x8765_4321
_PLUS, _MINUS = HASH.to_bytes(4, "little"), (-HASH & 0xFFFF_FFFF).to_bytes(4, "little")
_LOCKED = bytes.fromhex("f075fd")
_CALL = bytes.fromhex("41ffd3 c3")
_FORMS = {
    "clang's, without padding": b"\x41\xba" + _MINUS + bytes.fromhex("450353fc 7402 0f0b"),
    "clang's, with padding": b"\x41\xba" + _MINUS + bytes.fromhex("450353f1 7402 0f0b"),
    "FineIBT of 6.2": b"\x41\xba" + _PLUS + bytes.fromhex("4983eb10 0f1f4000"),
    "FineIBT of 6.15": b"\x41\xba" + _PLUS + bytes.fromhex("4d8d5bf0 0f1f4000"),
    "FineIBT that compares": b"\x41\xba" + _PLUS + bytes.fromhex("453b53f7 4d8d5bf0 75fd"),
    "FineIBT in eax": b"\xb8" + _PLUS + bytes.fromhex("4d8d5bf0 0f1f440000"),
    "FineIBT in eax that compares": b"\xb8" + _PLUS + bytes.fromhex("413b43f5 2e4d8d5bf0 75fd"),
}


@pytest.fixture(params=list(_FORMS))
def caller(request: pytest.FixtureRequest) -> bytes:
    return _FORMS[request.param] + _CALL


def _preamble(code: bytes) -> bytes | None:
    return cfi.preamble("f", [TextPart(addr=Addr(CALLER), code=code)])


def _called(code: bytes, before: bytes) -> bool:
    """Whether a caller's code comes to the callback and back, and not to an exception."""
    cpu = Cpu([(CALLER, 0x1000), (CALLBACK & ~0xFFF, 0x1000), (STACK & ~0xFFF, 0x1000)], [])
    cpu.add_exit(RETURN)
    if _LOCKED in code:
        # What a processor refuses there, a jump with a lock prefix, the emulator runs for ever.
        cpu.add_exit(CALLER + code.index(_LOCKED))
    cpu.write(CALLER, code)
    cpu.write(CALLBACK - PREAMBLE_SIZE, before + bytes.fromhex("f30f1efa 31c0 c3"))
    cpu.set_number(STACK, RETURN)
    cpu.set_registers({"ax": 1, "r11": CALLBACK, "sp": STACK})
    try:
        return cpu.run(CALLER) == RETURN and cpu.register("ax") == 0
    except UcError:
        return False


def test_a_caller_that_checks_comes_to_the_callback(caller: bytes) -> None:
    before = _preamble(caller)

    assert before is not None
    assert len(before) == PREAMBLE_SIZE
    assert _called(caller, before)


def test_it_would_not_come_there_without(caller: bytes) -> None:
    assert not _called(caller, b"\xcc" * PREAMBLE_SIZE)


@pytest.mark.parametrize(
    "code",
    [
        _CALL,
        b"\xeb\x0c" + _MINUS + bytes.fromhex("450353fc 7402 0f0b") + _CALL,
        b"\x41\xba" + _MINUS + bytes.fromhex("4d8d5bf8") + _CALL,
    ],
    ids=["none", "switched off", "of something else"],
)
def test_who_does_not_check_wants_nothing(code: bytes) -> None:
    assert _preamble(code) is None


@pytest.mark.parametrize("add", ["45035300", "450353ed", "450393fcffffff"])
def test_a_check_elsewhere_is_refused(add: str) -> None:
    with pytest.raises(RefusedError, match="not known"):
        _preamble(b"\x41\xba" + _MINUS + bytes.fromhex(add) + _CALL)
