"""Values of variables by debug information against gdb's, at random places of Debian's kernel.

Each has the same registers and memory, which mean nothing: what is compared is where values are,
and how they are computed.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.lines import beginnings
from kprobes.dwarf.source import open_source
from tests.build.debug_info import debug_vmlinux
from tests.build.gdb_stub import memory
from tests.build.gdb_values import GENERAL, gdb_values
from tests.build.locations import fetched

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

PLACES = 300
OF_UNIT = 5
NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
KERNEL = 0xFFFF_8000_0000_0000
"""So that registers lead to memory."""


def random_places(vmlinux: Path) -> list[int]:
    """Return addresses, as linked, at which code of a line begins."""
    dwarf = Dwarf(vmlinux)
    units, found = dwarf.unit_offsets(), list[int]()
    while len(found) < PLACES:
        unit = dwarf.die(random.choice(units))
        rows = beginnings(dwarf.rows(unit)) if unit is not None else []
        found += [row.addr for row in random.sample(rows, min(OF_UNIT, len(rows)))]
    dwarf.close()
    return found


def test_values_are_gdbs(tmp_path: Path, arch: str) -> None:
    vmlinux = debug_vmlinux(arch)
    places = [
        (addr, {name: KERNEL | random.getrandbits(47) & ~0xF for name in GENERAL[arch]})
        for addr in random_places(vmlinux)
    ]
    source = open_source([vmlinux], NAMES[arch], "", b"")

    seen = Counter[str]()
    for (addr, registers), theirs in zip(
        places, gdb_values(vmlinux, arch, places, tmp_path), strict=True
    ):
        for ours in source.variables(addr):
            number = theirs.get(ours.name)
            if ours.location is None or ours.spec is None:
                # It has those of other types, too, and pointers that lead nowhere.
                seen["only gdb's"] += number is not None
            elif number is not None:
                own = fetched(ours.location, registers, memory, ours.spec.size)
                assert [own, ours.spec.size] == number, (hex(addr), ours)
                seen[ours.location.kind] += 1
    assert seen["only gdb's"] < seen.total() / 20
    assert all(seen[kind] > 5 for kind in ("register", "memory", "constant", "computed")), seen
