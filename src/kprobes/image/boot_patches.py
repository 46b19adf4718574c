"""What boot rewrites in a kernel's text, by lists in its file that are freed afterwards.

struct alt_instr { s32 instr_offset, repl_offset; u16 cpuid; ...; u8 instrlen, replacementlen; };
struct paravirt_patch_site { u8 *instr; u8 type, len; };       // until 6.8, aligned to 8
s32 __return_sites[], __retpoline_sites[], __call_sites[], __ibt_endbr_seal[], __cfi_sites[],
    __smp_locks[], __start_runtime_ptr_NAME[], __start_runtime_shift_NAME[];
                                                                // each counts from itself
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kprobes.image.init_tables import alternatives
from kprobes.image.table import Table
from kprobes.image.text_tables import relative, table_bytes
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory

_CONSTANT = "__start_runtime_"
_PARAVIRT = ("__parainstructions", "__parainstructions_end")
_PARAVIRT_SIZE = 16


class BootPatch(StrEnum):
    """Why boot rewrites some bytes."""

    ALTERNATIVE = "alternative"
    PARAVIRT = "paravirt call"
    RETURN = "return"
    RETPOLINE = "retpoline"
    CALL = "call with depth tracking"
    ENDBR = "endbr64 nobody branches to"
    CFI = "CFI check"
    LOCK = "lock prefix"
    CONSTANT = "runtime constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """Bytes [start, stop) that boot may rewrite, and why; at link addresses.

    Attributes:
        what: of a constant, its name; else "".
    """

    start: int
    stop: int
    why: BootPatch
    what: str = ""


# The most bytes that each of these has.
_LISTS: Mapping[BootPatch, tuple[str, str, int]] = {
    BootPatch.RETURN: ("__return_sites", "__return_sites_end", 5),
    BootPatch.RETPOLINE: ("__retpoline_sites", "__retpoline_sites_end", 6),
    BootPatch.CALL: ("__call_sites", "__call_sites_end", 5),
    BootPatch.ENDBR: ("__ibt_endbr_seal", "__ibt_endbr_seal_end", 4),
    BootPatch.CFI: ("__cfi_sites", "__cfi_sites_end", 5),
    BootPatch.LOCK: ("__smp_locks", "__smp_locks_end", 1),
}


def read_boot_patches(image: Memory, kernel: Kernel, within: range) -> tuple[Rewritten, ...]:
    """Return everything in some text that boot may rewrite, by address.

    Args:
        image: the kernel's file.
        kernel: what it holds, at link addresses.
        within: link addresses.

    Raises:
        TargetError: a list cannot be.
    """
    found = [*_alternatives(image, kernel), *_paravirt(image, kernel)]
    for why in _LISTS:
        found += _listed(image, kernel, why, within)
    found += _constants(image, kernel)
    inside = (each for each in found if each.start < within.stop and each.stop > within.start)
    return tuple(sorted(inside, key=lambda each: (each.start, each.stop)))


def _alternatives(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    for start, stop in alternatives(image, kernel):
        yield Rewritten(start=start, stop=stop, why=BootPatch.ALTERNATIVE)


def _paravirt(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    # Each begins aligned; nothing pads the last.
    data = table_bytes(image, kernel, _PARAVIRT, 1)
    data += bytes(-len(data) % _PARAVIRT_SIZE)
    rows = np.frombuffer(data, np.uint8).reshape(-1, _PARAVIRT_SIZE)
    places = np.ascontiguousarray(rows[:, :8]).view("<u8")[:, 0].tolist()
    for place, size in zip(places, rows[:, 9].tolist(), strict=True):
        if kernel.text[0] <= place < kernel.text[1]:
            yield Rewritten(start=place, stop=place + size, why=BootPatch.PARAVIRT)


def _listed(image: Memory, kernel: Kernel, why: BootPatch, within: range) -> Iterator[Rewritten]:
    start, stop, size = _LISTS[why]
    table = Table(start=start, stop=stop, words=1, columns=1)
    places = relative(image, kernel, table)[0]
    low, high = np.uint64(max(within.start - size, 0)), np.uint64(within.stop)
    # A kernel has a quarter of a million calls.
    for place in places[(places >= low) & (places < high)].tolist():
        yield Rewritten(start=place, stop=place + size, why=why)


def _constants(image: Memory, kernel: Kernel) -> Iterator[Rewritten]:
    # Since e78298556ee5 ("runtime constants: add default dummy infrastructure") (v6.11).
    for symbol in kernel.symbols.glob(f"{_CONSTANT}*"):
        kind, _, name = symbol.name.removeprefix(_CONSTANT).partition("_")
        stop = symbol.name.replace("__start_", "__stop_", 1)
        table = Table(start=symbol.name, stop=stop, words=1, columns=1)
        size = 8 if kind == "ptr" else 1
        for place in relative(image, kernel, table)[0].tolist():
            yield Rewritten(start=place, stop=place + size, why=BootPatch.CONSTANT, what=name)
