"""Functions of the emulated guest whose returns are probed, site by site."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kprobes.arch.x86_64.facts import X86_64
from kprobes.codegen.compile import compile_probes
from kprobes.lang.filter import parse_filter
from kprobes.model.definition import Kind
from kprobes.model.plan import Displaced
from kprobes.model.resolved import Resolved
from kprobes.model.returns import Returning
from kprobes.units import Addr
from tests.build.filtered import known_of
from tests.build.kernel import TEXT, make_probe
from tests.build.machine import Machine, State

CALLERS = TEXT + 0x7100
"""Where functions are called from: one return address every 16 bytes."""
RETURN = bytes.fromhex("c3cccccccc")


@dataclass(frozen=True)
class Site:
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
    text: str, filter_text: str = "", *, event_id: int = 1, addr: int = TEXT + 0x1000
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


def patch(
    machine: Machine, site: Site, returning: Sequence[Returning], probes: Sequence[Resolved] = ()
) -> None:
    """Put a jump at a site to what is to be done there, and then to what is displaced."""
    recorded = [*probes, *(p for each in returning for p in each.returns.probes)]
    template = compile_probes(
        X86_64, machine.abi, probes, returning=returning, is_framed=True, is_patched=True
    )
    numbers = {**machine.numbers(recorded), "site": site.addr}
    body = machine.put(lambda place: template.link(place, numbers), recorded)
    way = machine.put(lambda place: X86_64.patch.detour(place, body, site.displaced))
    machine.cpu.write(site.addr, X86_64.patch.jump(Addr(site.addr), way))


def run(machine: Machine, start: int, state: State) -> tuple[int, dict[str, int]]:
    """Run from a place until a caller goes on: where, and with which registers."""
    machine.cpu.set_registers(state)
    pc = machine.cpu.run(start)
    while pc in machine.readers:
        pc = machine.cpu.run(machine.readers.run(pc))
    return pc, machine.cpu.registers()
