"""Addresses of an arm64 kernel that may carry a probe: we beside its own ``kprobe_events``.

Also what is taken from its file beside what it lists while it runs.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec import Struct

from kprobes.arch.aarch64.decode import decode_function
from kprobes.arch.aarch64.verdict import insn_verdict
from kprobes.guest.open import attached
from kprobes.image.file import kernel_from_image, read_image
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import read_function, read_tables
from kprobes.model.kernel import Kernel, TextTables
from kprobes.plan.ftrace import read_sites
from kprobes.ports import Memory
from kprobes.transport.qemu import Machine

pytestmark = [pytest.mark.guest, pytest.mark.arches("arm64")]

COUNT, OF_EACH = 250, 25
# Disabled probes are checked and prepared like others, and leave the text as it is.
SCRIPT = """cd /sys/kernel/tracing
for offset in {}; do
    if echo "p:k/e$offset _stext+0x$offset" 2> /dev/null >> kprobe_events
    then echo yes; else echo no; fi
done
: > kprobe_events"""

WE_REFUSE = {
    "ftrace strategy": "a breakpoint of its own stands there, where our call does",
    "after the function's last instruction": "it does not ask whether anything leads there",
}
"""Words of our reasons where the kernel accepts, and why that differs."""
SIGNED = frozenset({0xD50323BF, 0xD50323FF, 0xD65F0BFF, 0xD65F0FFF})
"""autiasp, autibsp, retaa, retab: in a detour the stack pointer is what it was."""
LOOKS_BACK = 32


class Case(Struct, frozen=True, kw_only=True):
    """One address, and both answers.

    Attributes:
        why: ours for refusing, "" when we accept.
        before: the words of the function up to the address, that at the address last.
    """

    place: str
    is_accepted: bool
    why: str
    before: tuple[int, ...]

    @property
    def is_explained(self) -> bool:
        """Whether the answers are the same, or differ for a known reason."""
        if self.is_accepted:
            return not self.why or any(words in self.why for words in WE_REFUSE)
        return bool(self.why) or self.before[-1] in SIGNED or self._seems_exclusive()

    def _seems_exclusive(self) -> bool:
        # is_probed_address_atomic() takes CAS and LDAR for exclusive loads, and follows no branch.
        for word in reversed(self.before[-1 - LOOKS_BACK : -1]):
            if word & 0x3F400000 == 0x08000000:
                return False
            if word & 0x3F400000 == 0x08400000:
                return True
        return False


class Live(Struct, frozen=True, kw_only=True, eq=False):
    """A running kernel, while it is looked at."""

    kernel: Kernel
    memory: Memory
    tables: TextTables

    def chosen(self) -> list[int]:
        """Addresses of traced functions: any, and some that may be refused."""
        rng = random.Random(6)
        sites = rng.sample(sorted(self.tables.ftrace), COUNT)
        found = [at for site in sites for at in self._inside(site, rng)]
        found += [each for site in sites[:OF_EACH] for each in (site, site - 4)]
        for table in (self.tables.exceptions, self.tables.jump_labels):
            found += [at for at in rng.sample(sorted(table), OF_EACH) if self._is_traced(at)]
        return sorted(set(found))

    def _inside(self, site: int, rng: random.Random) -> Iterator[int]:
        symbol = self.kernel.symbols.at(site)
        assert symbol is not None
        at = rng.randrange(symbol.addr, symbol.addr + symbol.size)
        yield at if rng.random() < 0.1 else at & ~3

    def _is_traced(self, addr: int) -> bool:
        # The others are refused as a whole: within_notrace_func() in kernel/trace/trace_kprobe.c.
        symbol = self.kernel.symbols.at(addr)
        return symbol is not None and symbol.addr + 4 in self.tables.ftrace

    def case(self, addr: int, *, is_accepted: bool) -> Case:
        """Judge an address."""
        name, parts = read_function(self.memory, self.kernel, addr)
        function = decode_function(name, parts, self.tables)
        verdict = insn_verdict(function, addr, self.tables)
        part = next(part for part in parts if part.addr <= addr < part.stop)
        words = np.frombuffer(part.code, "<u4", (addr - part.addr) // 4 + 1)
        return Case(
            place=function.place(addr),
            is_accepted=is_accepted,
            why=verdict.why if verdict.is_refused else "",
            before=tuple(words.tolist()),
        )


@pytest.fixture
def live(guest: Machine) -> Iterator[Live]:
    with attached(f"qemu:{guest.stub_address}") as seen:
        sites = read_sites(seen.memory, seen.kernel).addrs.tolist()
        tables = read_tables(seen.memory, seen.kernel, ftrace=sites)
        yield Live(kernel=seen.kernel, memory=seen.memory, tables=tables)


def test_refusals_are_the_kernels_or_have_a_documented_reason(guest: Machine, live: Live) -> None:
    base, addrs = live.kernel.symbols.named("_stext").addr, live.chosen()
    offsets = " ".join(f"{addr - base:x}" for addr in addrs)

    words = guest.run(SCRIPT.format(offsets), 300).output.decode().split()

    cases = [
        live.case(addr, is_accepted=word == "yes") for addr, word in zip(addrs, words, strict=True)
    ]
    assert [case for case in cases if not case.is_explained] == []
    same = [case for case in cases if case.is_accepted != bool(case.why)]
    assert len(same) > 0.8 * len(cases) > COUNT
    assert sum(not case.is_accepted for case in same) > OF_EACH


def test_the_tracers_sites_are_those_that_the_guest_lists(guest: Machine, live: Live) -> None:
    command = "cut -d' ' -f1 /sys/kernel/tracing/available_filter_functions | sort | uniq -c"
    listed = guest.run(f"{command} | wc -l", 120).output.split()

    symbols = [live.kernel.symbols.at(site) for site in live.tables.ftrace]

    assert int(listed[0]) == len({symbol.name for symbol in symbols if symbol is not None})


def test_the_file_tells_what_the_running_kernel_does(guest: Machine, live: Live) -> None:
    image = read_image(guest.kernel)
    kernel = kernel_from_image(image)
    tables, slide = read_image_tables(image, kernel), live.kernel.slide

    assert kernel.build_id == live.kernel.build_id
    assert (tables.missing, live.tables.missing) == ("", "")
    assert {site + slide for site in tables.ftrace} == live.tables.ftrace
    assert {at + slide for at in tables.exceptions} == set(live.tables.exceptions)
    assert {at + slide for at in tables.jump_labels} == set(live.tables.jump_labels)
    assert tables.has_landing_pads == live.tables.has_landing_pads
    assert len(tables.alternatives) > 1_000
