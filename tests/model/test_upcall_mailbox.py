"""The area that a guest and Python share: nobody's words are where another's are."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.model.upcall import REQUEST_HEAD, MailboxLayout, registers_of


@pytest.mark.parametrize("arch", [X86_64, AARCH64], ids=lambda arch: arch.name)
def test_a_slot_has_room_for_every_register_of_an_architecture(arch: Arch) -> None:
    words = [*REQUEST_HEAD, *registers_of(arch.upcall.saved)]

    assert 8 * len(words) <= MailboxLayout(cpus=1).room
