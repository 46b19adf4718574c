"""Objects and symbols for drgn: where they are, and of what type, by BTF and by what we declare."""

from collections.abc import Mapping

import pytest
from drgn import Architecture, Platform, Program, Symbol, SymbolKind

from kprobes.drgn.objects import ObjectFinder, SymbolFinder
from kprobes.drgn.registers import pt_regs
from kprobes.drgn.types import TypeFinder
from kprobes.drgn.variables import VARIABLES
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.formats.btf_index import Kind
from kprobes.model import kernel
from kprobes.units import Addr
from tests.build.btf import BtfBuilder, kernel_types
from tests.build.kernel import FakeSymbols

_TEXT = range(0x1000, 0x2000)


def program(builder: BtfBuilder, places: Mapping[str, tuple[int, int]]) -> Program:
    """Return one with some types, and symbols: name to address and size."""
    prog = Program(Platform(Architecture.X86_64))
    types = TypeFinder(prog, Btf(btf_index.parse(builder.build())))
    prog.register_type_finder("tested", types, enable_index=0)

    def find(name: str) -> kernel.Symbol | None:
        if name not in places:
            return None
        addr, size = places[name]
        return kernel.Symbol(addr=Addr(addr), name=name, type="T", size=size)

    objects = ObjectFinder(types, find, lambda addr: addr in _TEXT)
    prog.register_object_finder("tested", objects, enable_index=0)
    return prog


def types_of_variables() -> BtfBuilder:
    b = kernel_types()
    b.struct("task_struct", 64, [])
    b.struct("softirq_action", 8, [])
    b.enum("irqs", {"HI_SOFTIRQ": 0, "NR_SOFTIRQS": 10})
    unsigned = b.int_("unsigned int", 4)
    b.struct("", 16, [("seq", unsigned, 0), ("timekeeper", unsigned, 64)])
    return b


def test_functions_are_of_their_types_or_of_any() -> None:
    prog = program(kernel_types(), {"openat": (0x1010, 8), "copied.cold": (0x1020, 8)})

    assert prog["openat"].address_ == 0x1010
    assert prog["openat"].type_.parameters is not None
    assert prog["copied.cold"].type_.type_name() == "void ()"
    # BTF knows it, the kernel does not.
    with pytest.raises(LookupError):
        prog.function("printk")


def test_variables_are_what_is_declared() -> None:
    places = {
        "init_task": (0x5000, 64),
        "softirq_vec": (0x6000, 96),
        "__per_cpu_offset": (0x7000, 64),
        "tk_core": (0x8000, 16),
        "slab_caches": (0x9000, 16),
        "nobody_declares_it": (0xA000, 8),
    }
    prog = program(types_of_variables(), places)

    shown = {name: prog[name].type_.type_name() for name in list(places)[:5]}

    assert shown == {
        "init_task": "struct task_struct",
        "softirq_vec": "struct softirq_action [10]",
        "__per_cpu_offset": "unsigned long [8]",
        "tk_core": "struct <anonymous>",
        "slab_caches": "struct list_head",
    }
    assert prog["init_task"].address_ == 0x5000
    # No such type, no such symbol, no such declaration.
    for name in ("vmap_nodes", "super_blocks", "nobody_declares_it"):
        with pytest.raises(LookupError):
            prog.variable(name)


def test_every_declaration_has_a_type_and_a_name() -> None:
    lines = [line for line in VARIABLES.splitlines() if line]

    assert all(line.endswith(";") and " " in line for line in lines)
    assert len(lines) == len(set(lines))


def test_variables_of_each_cpu_are_where_an_exported_one_says() -> None:
    b = BtfBuilder()
    number = b.int_("int", 4)
    b.add(Kind.VAR, "vm_event_states", number, words=[1])
    b.add(Kind.VAR, "runqueues", number, words=[1])
    words = [2, 0x40, 4, 3, 0x100, 4]
    b.add(Kind.DATASEC, ".data..percpu", 0x104, words=words, info=2)

    assert program(b, {"vm_event_states": (0x9040, 4)}).variable("runqueues").address_ == 0x9100
    known = program(b, {"vm_event_states": (0x9040, 4), "runqueues": (0x9999, 4)})
    assert known.variable("runqueues").address_ == 0x9999
    with pytest.raises(LookupError):
        program(b, {}).variable("runqueues")


def test_constants_are_enumerators() -> None:
    prog = program(kernel_types(), {})

    assert prog.constant("GONE").value_() == 2
    assert prog.constant("MINUS").value_() == -1
    assert prog.constant("GONE").type_.type_name() == "enum state"
    with pytest.raises(LookupError):
        prog.constant("ABSENT")


def test_symbols_are_found_by_name_and_by_address() -> None:
    symbols = FakeSymbols(
        [
            kernel.Symbol(addr=Addr(0x1000), name="code", type="t", size=0x10),
            kernel.Symbol(addr=Addr(0x5000), name="data", type="T", size=0x10),
        ]
    )
    find = SymbolFinder(lambda: symbols, lambda addr: addr in _TEXT)
    prog = Program(Platform(Architecture.X86_64))

    def names(found: "list[Symbol]") -> list[str]:
        return [each.name for each in found]

    (code,) = find(prog, "code", None, True)
    assert (code.address, code.size, code.kind) == (0x1000, 0x10, SymbolKind.FUNC)
    (data,) = find(prog, None, 0x5004, True)
    assert (data.name, data.kind) == ("data", SymbolKind.OBJECT)
    assert find(prog, "code", 0x5004, True) == []
    assert find(prog, "absent", None, False) == []
    assert find(prog, None, 0x9000, True) == []
    assert names(list(find(prog, None, None, False))) == ["code", "data"]


def test_registers_are_where_the_struct_has_them() -> None:
    b = BtfBuilder()
    word = b.int_("long unsigned int", 8)
    b.struct("pt_regs", 32, [("regs", b.array(word, 2), 0), ("sp", word, 128), ("pc", word, 192)])
    values = {"x0": 1, "x1": (1 << 64) - 1, "sp": 3, "pc": 4, "orig_ax": 5}

    found = pt_regs(program(b, {}), values)

    assert [found.regs[0].value_(), found.regs[1].value_()] == [1, (1 << 64) - 1]
    assert [found.sp.value_(), found.pc.value_()] == [3, 4]
