"""A guest's vCPUs as the mailbox sees them: they ask, give up and take answers."""

import struct

from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest.arena import Arena
from kprobes.guest.guest import GuestMemory
from kprobes.guest.upcalls import Mailbox
from kprobes.model.upcall import REQUEST_HEAD, MailboxLayout, registers_of
from tests.build.guest import make_arena, make_memory
from tests.build.pages import FakeRam
from tests.build.waiting import PATIENCE_S, becomes_true

SAVED = X86_64.upcall.saved
REGISTERS = registers_of(SAVED)
SP = 0xFFFF_C900_0000_3F00


class Callers:
    """All vCPUs of a guest, and the mailbox that they share with Python."""

    def __init__(self, *, has_views: bool = True) -> None:
        found = make_memory()
        ram = found.ram
        assert isinstance(ram, FakeRam)
        ram.has_views = has_views
        self.memory: GuestMemory = found
        self.arena: Arena = replace(make_arena())
        self.layout: MailboxLayout = self.arena.mailbox_layout
        self.memory.write(self.arena.mailbox, bytes(self.layout.size))
        self.mailbox = Mailbox(self.arena, self.memory, SAVED)

    def get(self, offset: int) -> int:
        return self.memory.u64(self.arena.mailbox + offset)

    def set(self, offset: int, value: int) -> None:
        self.memory.set_u64(self.arena.mailbox + offset, value)

    def ask(self, slot: int, upcall: int = 1, **registers: int) -> int:
        """Ask, and return the question's number."""
        values = {name: n for n, name in enumerate(REGISTERS)} | {"sp": SP} | registers
        words = [upcall, 0xFFFF_8880_0000_1000, 0x1234_5000, *(values[name] for name in REGISTERS)]
        assert len(words) == len(REQUEST_HEAD) + len(REGISTERS)
        place = self.arena.mailbox + self.layout.requests + self.layout.room * slot
        self.memory.write(place, struct.pack(f"<{len(words)}Q", *words))
        seq = self.get(self.layout.asked + 8 * slot) + 1
        self.set(self.layout.asked + 8 * slot, seq)
        return seq

    def give_up(self, slot: int) -> None:
        self.set(self.layout.absent, self.get(self.layout.present))
        self.set(self.layout.gave_up + 8 * slot, self.get(self.layout.asked + 8 * slot))

    def answered(self, slot: int) -> int:
        return self.get(self.layout.answered + 8 * slot)

    def answer(self, slot: int) -> dict[str, int]:
        """Return the registers of a slot's answer."""
        at = self.layout.answers + self.layout.room * slot
        return {name: self.get(at + 8 * n) for n, name in enumerate(REGISTERS)}

    @property
    def is_anyone_there(self) -> bool:
        """Whether a vCPU that came now would wait."""
        present = self.get(self.layout.present)
        return present not in (0, self.get(self.layout.absent))

    def wait_for(self, slot: int, seq: int, timeout_s: float = PATIENCE_S) -> bool:
        """Wait as a vCPU does; whether an answer came."""
        return becomes_true(lambda: self.answered(slot) == seq, timeout_s)
