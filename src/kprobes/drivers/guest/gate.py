"""The gate of an arena: the code through which all hits go that wait for Python."""

from kprobes.arch.facts import Arch
from kprobes.codegen.upcall import compile_upcall
from kprobes.drivers.guest.area import aligned
from kprobes.drivers.guest.arena import Arena
from kprobes.model.abi import GuestAbi
from kprobes.units import Addr


def build_gate(arch: Arch, abi: GuestAbi, arena: Arena, place: Addr) -> bytes:
    """Return the gate's code for a place in an arena, its entry first."""
    template = compile_upcall(arch, abi, arena.mailbox, arena.mailbox_layout)
    # How long it is does not depend on what it calls.
    head = len(arch.upcall.gate(place, place))
    function = aligned(place + head)
    code = arch.upcall.gate(place, function)
    code = padded(code, function - place, arch.code.call.padding)
    return code + template.link(function, {})


def padded(code: bytes, size: int, padding: bytes) -> bytes:
    """Return code and as much padding behind it as makes it so long."""
    missing = size - len(code)
    return code + (padding * missing)[:missing]
