"""Functions of the emulated arm64 guest whose returns are probed, with signed return addresses."""

import struct
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.codegen.compile import compile_probes, saved_reads
from kprobes.model.plan import (
    TRAMPOLINE_HEADER,
    Displaced,
    InstanceTable,
    Returning,
    ReturnMethod,
    Returns,
    Role,
)
from kprobes.model.resolved import Resolved
from kprobes.units import Addr
from tests.build.arm64 import KERNEL, MAILBOX, TEXT, Arm64Machine, make_probe, random_state

CALLERS = TEXT + 0x6000
INSTANCES, INSTANCES_SIZE = MAILBOX + 0x1_0000, 0x1000
MISSED_UPCALL = KERNEL + 0x1800
_PACIASP, _AUTIASP = bytes.fromhex("3f2303d5"), bytes.fromhex("bf2303d5")
_PUSH = bytes.fromhex("fd7bbea9 f35301a9")
"""stp x29, x30, [sp, #-32]!; stp x19, x20, [sp, #16]"""
_POP = bytes.fromhex("f35341a9 fd7bc2a8")
RETAA = bytes.fromhex("ff0b5fd6")
RET = encode.ret()


def return_probe(text: str, *, event_id: int = 1, addr: int) -> Resolved:
    """Resolve a probe at returns with the caller in its record."""
    probe = make_probe(text, event_id=event_id, addr=addr)
    layout = probe.layout
    told = replace(layout, caller_offset=layout.size, size=layout.size + 8)
    return replace(probe, layout=told)


class Leaving(Struct, frozen=True):
    """How a function ends: what is after its frame's end.

    Attributes:
        code: the instruction that leaves it.
        is_signed: whether that checks the return address itself.
    """

    code: bytes
    is_signed: bool = False


class Function:
    """A function that signs its return address, calls what it is told to, and leaves.

    Attributes:
        addr: its entry.
        inside: where it stands with its frame made; ``work`` is put there.
        leave: its last instruction.
    """

    def __init__(
        self, machine: Arm64Machine, returns: Returns, leaving: Leaving, work: bytes = b""
    ) -> None:
        self.machine, self.returns = machine, returns
        self.addr = returns.entry
        self.inside = self.addr + 20
        check = b"" if leaving.is_signed else _AUTIASP
        code = AARCH64.site.preamble + encode.NOP + _PACIASP + _PUSH + work + _POP + check
        self.leave, self._last = Addr(self.addr + len(code)), leaving.code
        machine.cpu.write(self.addr, code + leaving.code)
        place = INSTANCES + INSTANCES_SIZE * (self.addr >> 8 & 3)
        self.instances = InstanceTable(
            addr=Addr(place), count=8, stride=returns.stride, trampoline=Addr(0)
        )
        machine.cpu.write(place, bytes(INSTANCES_SIZE))

    def arm(self) -> None:
        """Put what its way needs at its sites."""
        if self.returns.takes_over:
            self._add_trampoline()
        if self.returns.return_method is ReturnMethod.RETHOOK:
            self._enter(Role.HOOK)
            return
        if self.returns.keeps:
            self._enter(Role.ENTER)
        self._leave(Role.TAIL if self.returns.return_method is ReturnMethod.TAIL else Role.RETURN)

    def used(self) -> int:
        """Return how many instances are in use."""
        raw = self.machine.cpu.read(self.instances.addr, self.instances.size)
        stride = self.instances.stride
        return sum(any(raw[at : at + 8]) for at in range(0, len(raw), stride))

    def call(self, number: int = 0, **fixed: int) -> tuple[int, dict[str, int], dict[str, int]]:
        """Call it from a caller; return where that goes on, and registers before and after."""
        caller = CALLERS + 16 * number
        self.machine.cpu.add_exit(caller)
        state = random_state(self.machine.random, x30=caller, **fixed)
        self.machine.cpu.set_registers(state)
        went = self.machine.run(self.addr)
        return went, state, self.machine.cpu.registers()

    def patch_branch(self, branch: bytes, at: Addr) -> None:
        """Probe a conditional jump out of it."""
        body = self._body(Role.TAIL, at)
        displaced = Displaced(addr=at, code=branch, count=1, stop=Addr(at + 4))
        return_method = self.machine.put(
            lambda place: AARCH64.returns.branch_detour(place, None, body, displaced)
        )
        self.machine.cpu.write(at, encode.b(at, return_method))

    def add_trampoline(self) -> None:
        """Make its trampoline alone."""
        self._add_trampoline()

    def _add_trampoline(self) -> None:
        machine, instances = self.machine, self.instances
        body = self._body(Role.TRAMPOLINE, self.addr, self.returns.probes)
        header = struct.pack("<QQQ", 0, instances.addr, instances.stride << 32 | instances.count)
        start = machine.put(
            lambda place: header + AARCH64.returns.trampoline(Addr(place + len(header)), body)
        )
        self.instances = replace(instances, trampoline=Addr(start + TRAMPOLINE_HEADER))

    def _enter(self, role: Role) -> None:
        body, site = self._body(role, self.addr), Addr(self.addr + 4)
        reads = saved_reads(AARCH64, (), [Returning(role=role, returns=self.returns)])
        entry = self.machine.put(lambda place: AARCH64.site.entry(place, body, reads=reads))
        self.machine.cpu.write(site, AARCH64.site.branch(site, entry))

    def _leave(self, role: Role) -> None:
        probes = self.returns.probes if role is Role.RETURN else ()
        body = self._body(role, self.leave, probes)
        displaced = Displaced(addr=self.leave, code=self._last, count=1, stop=Addr(self.leave + 4))
        return_method = self.machine.put(lambda place: AARCH64.patch.detour(place, body, displaced))
        self.machine.cpu.write(self.leave, encode.b(self.leave, return_method))

    def _body(self, role: Role, site: int, recorded: Sequence[Resolved] = ()) -> Addr:
        machine, instances = self.machine, self.instances
        returning = [Returning(role=role, returns=self.returns)]
        template = compile_probes(
            AARCH64, machine.abi, (), returning=returning, is_framed=True, is_patched=True
        )
        numbers = {
            **machine.numbers(self.returns.probes, site),
            "missed_upcall": MISSED_UPCALL,
            "instances": instances.addr,
            "instance_count": instances.count,
            "trampoline": instances.trampoline,
        }
        place = machine.put(lambda place: template.link(place, numbers))
        machine.know(recorded)
        return place
