"""Functions of the emulated guest whose returns are probed, site by site."""

import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import compile_probes, needs_frame
from kprobes.lang.filter import parse_filter
from kprobes.model.definition import Kind
from kprobes.model.plan import (
    INSTANCE_MULTIPLIER,
    TRAMPOLINE_HEADER,
    Displaced,
    InstanceTable,
    Returning,
    ReturnMethod,
    Returns,
    Role,
)
from kprobes.model.resolved import Resolved
from kprobes.units import U64, Addr
from tests.build.filtered import known_of
from tests.build.kernel import SITE, TEXT, make_probe
from tests.build.machine import KERNEL, MAILBOX, Machine, State

MISSED_UPCALL = KERNEL + 0x1800
"""Counts returns that Python does not see."""
CALLERS = TEXT + 0x7100
"""Where functions are called from: one return address every 16 bytes."""
RETURN = bytes.fromhex("c3cccccccc")
INSTANCES, INSTANCES_SIZE = MAILBOX + 0x1_0000, 0x1000
"""Of one function after the other: its calls in progress."""
_JMP = b"\xe9"
_FOLLOW = bytes.fromhex("488b5d00 488d6d08 ffe3")
"""mov rbx, [rbp]; lea rbp, [rbp+8]; jmp rbx"""


class Site(Struct, frozen=True):
    """One site of a function: where it is, and the bytes that are probed there."""

    addr: int
    code: bytes

    @property
    def displaced(self) -> Displaced:
        """What a patch there displaces: its first instruction."""
        code = self.code.rstrip(b"\xcc")
        stop = Addr(self.addr + len(self.code))
        return Displaced(addr=Addr(self.addr), code=code, count=1, stop=stop)


def return_probe(
    text: str, filter_text: str = "", *, event_id: int = 1, addr: int = SITE
) -> Resolved:
    """Resolve a probe, at a return with the caller in its record, with a filter if there is one."""
    probe = make_probe(text, event_id=event_id, addr=addr)
    if filter_text:
        probe = replace(probe, filter=parse_filter(filter_text, known_of(probe)))
    if probe.definition.kind is Kind.ENTRY:
        return probe
    layout = probe.layout
    if layout.caller_offset is not None:
        return probe
    told = replace(layout, caller_offset=layout.size, size=layout.size + 8)
    return replace(probe, layout=told)


class Function:
    """A function whose sites are probed: from its entry on it goes where a script says.

    The script is at the base pointer: addresses to jump to, one after the other.

    Attributes:
        returns: its return probes.
        instances: where its calls in progress are.
        addr: its entry, an ftrace site.
        leave: its return instruction.
        tail: its jump to ``target``.
        branch: where ``patch_branch`` puts a conditional jump.
        sleep: where it stops, and goes on from ``wake``.
    """

    def __init__(
        self, machine: Machine, returns: Returns, *, count: int = 8, target: int = 0
    ) -> None:
        self.machine, self.returns = machine, returns
        self.addr = returns.entry
        self.leave = Site(self.addr + 0x20, RETURN)
        self.tail = Site(self.addr + 0x30, _JMP + _distance(self.addr + 0x35, target or self.addr))
        self.branch = Site(self.addr + 0x60, b"")
        self.sleep, self.wake = self.addr + 0x40, self.addr + 0x48
        assert returns.stride * count <= INSTANCES_SIZE
        place = INSTANCES + INSTANCES_SIZE * (self.addr - SITE >> 8)
        self.instances = InstanceTable(
            addr=Addr(place), count=count, stride=returns.stride, trampoline=Addr(0)
        )
        machine.cpu.write(self.addr, X86_64.site.nops[0] + _FOLLOW)
        machine.cpu.write(self.leave.addr, self.leave.code)
        machine.cpu.write(self.tail.addr, self.tail.code)
        machine.cpu.write(self.wake, _FOLLOW)
        machine.cpu.add_exit(self.sleep)
        machine.cpu.write(place, bytes(INSTANCES_SIZE))

    def arm(self) -> None:
        """Put what its way needs at its sites, in the place of what was there before."""
        self.machine.cpu.forget_code(self.addr, self.wake + len(_FOLLOW) - self.addr)
        if self.returns.takes_over:
            self._add_trampoline()
        if self.returns.return_method is ReturnMethod.RETHOOK:
            self.enter(Role.HOOK)
            return
        if self.returns.keeps:
            self.enter(Role.ENTER)
        self.patch(self.leave, Role.RETURN)
        if self.returns.return_method is ReturnMethod.TAIL:
            self.patch(self.tail, Role.TAIL)

    def enter(self, role: Role, probes: Sequence[Resolved] = ()) -> None:
        """Have the entry call what is to be done there, after its own probes."""
        machine, returning = self.machine, [Returning(role=role, returns=self.returns)]
        is_framed = needs_frame(X86_64, probes, returning)
        template = compile_probes(
            X86_64, machine.abi, probes, returning=returning, is_framed=is_framed
        )
        recorded = (*probes, *self.returns.probes)
        numbers = self._numbers(self.addr) | machine.numbers(recorded)
        body = machine.put(lambda place: template.link(place, numbers), probes)
        if is_framed:
            called = body
            body = machine.put(lambda place: X86_64.site.entry(place, called))
        machine.cpu.write(self.addr, X86_64.site.branch(self.addr, body))

    def patch(self, site: Site, role: Role) -> None:
        """Put a jump at a site to what is to be done there."""
        patch(
            self.machine,
            site,
            [Returning(role=role, returns=self.returns)],
            numbers=self._numbers(site.addr),
        )

    def patch_branch(self, jump: bytes, return_address_size: int) -> None:
        """Put a conditional jump out of the function at its place, with its probe."""
        machine, site = self.machine, Site(self.branch.addr, jump)
        returning = [Returning(role=Role.TAIL, returns=self.returns, is_conditional=True)]
        template = compile_probes(
            X86_64, machine.abi, (), returning=returning, is_framed=True, is_patched=True
        )
        numbers = self._numbers(site.addr)
        body = machine.put(lambda place: template.link(place, numbers))
        return_method = machine.put(
            lambda place: X86_64.returns.branch_detour(place, None, body, site.displaced)
        )
        stop = site.addr + len(jump)
        machine.cpu.write(stop, X86_64.patch.jump(Addr(stop), Addr(return_address_size)))
        machine.cpu.write(site.addr, X86_64.patch.jump(Addr(site.addr), return_method))

    def used(self) -> dict[int, list[tuple[int, ...]]]:
        """Return the words of its instances after the slot, by slot, in the order of the search."""
        words, size = self.instances.stride // 8, self.instances.stride
        found: dict[int, list[tuple[int, ...]]] = {}
        raw = self.machine.cpu.read(self.instances.addr, self.instances.size)
        rows = [struct.unpack(f"<{words}Q", raw[at : at + size]) for at in range(0, len(raw), size)]
        for slot in {row[0] for row in rows if row[0]}:
            start = home(slot, self.instances.count)
            order = rows[start:] + rows[:start]
            found[slot] = [row[1:] for row in order if row[0] == slot]
        return found

    def _add_trampoline(self) -> None:
        machine, instances = self.machine, self.instances
        returning = [Returning(role=Role.TRAMPOLINE, returns=self.returns)]
        template = compile_probes(
            X86_64, machine.abi, (), returning=returning, is_framed=True, is_patched=True
        )
        numbers = self._numbers(self.addr)
        body = machine.put(lambda place: template.link(place, numbers), self.returns.probes)
        header = struct.pack("<QQQ", 0, instances.addr, instances.stride << 32 | instances.count)
        assert len(header) == TRAMPOLINE_HEADER
        start = machine.put(
            lambda place: header + X86_64.returns.trampoline(Addr(place + len(header)), body)
        )
        self.instances = replace(instances, trampoline=Addr(start + len(header)))

    def _numbers(self, site: int) -> dict[str, int]:
        instances = self.instances
        return {
            **self.machine.numbers(self.returns.probes),
            "site": site,
            "missed_upcall": MISSED_UPCALL,
            "instances": instances.addr,
            "instance_count": instances.count,
            "trampoline": instances.trampoline,
        }


def home(slot: int, count: int) -> int:
    """Return the number of the instance at which the search for a slot's begins."""
    return ((slot * INSTANCE_MULTIPLIER & U64) >> 32) * count >> 32


def patch(
    machine: Machine,
    site: Site,
    returning: Sequence[Returning],
    *,
    probes: Sequence[Resolved] = (),
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Put a jump at a site to what is to be done there, and then to what is displaced."""
    recorded = [*probes, *(p for each in returning for p in each.returns.probes)]
    template = compile_probes(
        X86_64, machine.abi, probes, returning=returning, is_framed=True, is_patched=True
    )
    values = {**(numbers or machine.numbers(recorded)), "site": site.addr}
    body = machine.put(lambda place: template.link(place, values), recorded)
    return_method = machine.put(lambda place: X86_64.patch.detour(place, body, site.displaced))
    machine.cpu.write(site.addr, X86_64.patch.jump(Addr(site.addr), return_method))


def run(machine: Machine, start: int, state: State) -> tuple[int, dict[str, int]]:
    """Run from a place until a caller goes on: where, and with which registers."""
    machine.cpu.set_registers(state)
    pc = machine.cpu.run(start)
    while pc in machine.readers:
        pc = machine.cpu.run(machine.readers.run(pc))
    return pc, machine.cpu.registers()


def _distance(return_address_size: int, target: int) -> bytes:
    return (target - return_address_size).to_bytes(4, "little", signed=True)
