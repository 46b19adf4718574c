"""Injected calls on aarch64.

A function returns to x30, and leaves x19 to x28 and sp as they were. So the return trap is any call
through one of these registers, in a function that hardly anybody calls, and the register leads to
the kernel's return from an interrupt. That takes pt_regs from the stack pointer, and the stack
pointer goes up by its size: it gives registers back only to whoever is right above. Hence two of
them. Stack of the task, from low to high addresses:

    pt_regs again;    // goes on at the same return; its first words are for arguments beyond the
                      // eighth, which are on the stack (AAPCS64, 6.8.2)
    pt_regs frame;    // what the task was doing: it ends at its stack pointer

struct pt_regs {    // arch/arm64/include/asm/ptrace.h
    u64 regs[31], sp, pc, pstate;
    ...             // to the multiple of 16 by which the return moves the stack pointer
};

What the return loads, and that size, are read from its text.

Where the text is guarded (CONFIG_ARM64_BTI_KERNEL) no register leads there: a branch through one
must land on an instruction for that, but a return may go anywhere. There the trap is the kernel's
return from interrupts itself; whoever else comes to it meanwhile is moved past its first.
"""

import struct
from collections.abc import Mapping

from kprobes.arch.aarch64.encode import REACH
from kprobes.arch.aarch64.insn import first_register, fits
from kprobes.arch.aarch64.paging import PageTables
from kprobes.arch.aarch64.registers import ARGUMENTS, NAMES, STUB_NAMES
from kprobes.arch.insn import Read
from kprobes.arch.machine import (
    CallSetup,
    CodeRequest,
    FunctionCall,
    InjectOps,
    MappedMemory,
    ReturnPath,
    address_of,
    alloc_between,
    alloc_like_module,
)
from kprobes.errors import TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import MIB, U64, Addr

_WORD = 8
_PAGE = 4096
_FINISH = "ret_to_kernel"
_UNCALLED = (
    "iterate_supers_type",
    "walk_process_tree",
    "cpu_suspend",
    "machine_kexec",
    "pm_runtime_force_suspend",
    "pm_runtime_force_resume",
)
"""A task that comes to a trap and is not ours is moved past it."""
_CALLEE_SAVED = range(19, 28)
"""And x28, which has the call's number."""
_BLR = (
    0b1111111_1_1_11_11111_1111_1_1_00000_11111,
    0b1101011_0_0_01_11111_0000_0_0_00000_00000,
)
_ERET = 0b1101011_0_100_11111_0000_0_0_11111_00000
_LDP_PC_PSTATE = 0b10_101_0_010_1_0100000_10110_11111_10101
"""``ldp x21, x22, [sp, #256]``."""
_LDR_LINK = 0b11_111_0_01_01_000000011110_11111_11110
"""``ldr x30, [sp, #240]``."""
_ADD_SP, _ADD_MASK = 0b1_0_0_100010_0_000000000000_11111_11111, 0xFFC0_03FF
_DAIF = 0b1111 << 6
_MASK = 0b1101010100_0_00_011_0100_1111_110_11111
"""``msr daifset, #15``."""
_UNKNOWN_RETURN = "this kernel returns from interrupts in a way that is not known"
_BTYPE = 0b11 << 10
_GUARDED = 1 << 50
"""GP: an indirect branch into the page must land on an instruction for that."""
_IDLE = ("cpu_do_idle",)
_IRQS_OFF = 1 << 7
_REACH = 100 * MIB
"""Of the 128 MiB that ``b`` reaches, the text itself takes some."""


def _return_path(memory: MappedMemory, kernel: Kernel) -> ReturnPath:
    finish = kernel.symbols.find(_FINISH)
    if finish is None:
        raise TargetError(f"kernel {kernel.release} has no {_FINISH}")
    words = _words(memory.read(finish.addr, min(finish.size, _PAGE)))
    size = _taken_off(words)
    if _known(memory).attributes(finish.addr) & _GUARDED:
        if words[0] != _MASK:
            raise TargetError(_UNKNOWN_RETURN)
        return ReturnPath(trap=finish.addr, then=(finish.addr,), size=size)
    trap, register = _trap(memory, kernel)
    return ReturnPath(trap=trap, then=(finish.addr,), register=f"x{register}", size=size)


def _taken_off(words: tuple[int, ...]) -> int:
    # All alternatives have been applied: what is read is what runs.
    words = words[: words.index(_ERET)] if _ERET in words else ()
    sizes = [word >> 10 & 0xFFF for word in words if word & _ADD_MASK == _ADD_SP]
    if _LDP_PC_PSTATE not in words or _LDR_LINK not in words or len(sizes) != 1:
        raise TargetError(_UNKNOWN_RETURN)
    return sizes[0]


def _trap(memory: MappedMemory, kernel: Kernel) -> tuple[Addr, int]:
    for name in _UNCALLED:
        symbol = kernel.symbols.find(name)
        if symbol is None:
            continue
        words = _words(memory.read(symbol.addr, min(symbol.size, _PAGE)))
        for number, word in enumerate(words):
            if fits(word, _BLR) and first_register(word) in _CALLEE_SAVED:
                return Addr(symbol.addr + 4 * number), first_register(word)
    raise TargetError("no place to return to was found in this kernel's text")


def _words(code: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(code) // 4}I", code[: len(code) & ~3])


def _known(memory: MappedMemory) -> PageTables:
    if not isinstance(memory.tables, PageTables):
        raise TypeError(f"{memory.tables!r} are not tables of this architecture")
    return memory.tables


def _save_frame(return_path: ReturnPath, registers: Mapping[str, int]) -> tuple[int, bytes]:
    own = {name: registers[STUB_NAMES[name]] for name in NAMES}
    again = own | {"pc": return_path.then[-1], "pstate": (own["pstate"] | _DAIF) & ~_BTYPE}
    data = b"".join(_pt_regs(each).ljust(return_path.size, b"\0") for each in (again, own))
    return own["sp"] - len(data), data


def _pt_regs(values: Mapping[str, int]) -> bytes:
    return struct.pack(f"<{len(NAMES)}Q", *(values[name] for name in NAMES))


def _set_up_call(return_path: ReturnPath, frame: int, called: FunctionCall) -> CallSetup:
    return _setup(frame, called, {"x30": return_path.trap, **_onward(return_path)})


def _at_trap(
    return_path: ReturnPath, frame: int, registers: Mapping[str, int]
) -> Mapping[str, int]:
    # A task that was stopped where it had come by a register would have to land there, too.
    place = {"pc": return_path.trap, "sp": frame, "cpsr": registers["cpsr"] & ~_BTYPE}
    return {**place, **_onward(return_path)}


def _onward(return_path: ReturnPath) -> Mapping[str, int]:
    return {return_path.register: return_path.then[-1]} if return_path.register else {}


def _setup(frame: int, called: FunctionCall, links: Mapping[str, int]) -> CallSetup:
    args = [value & U64 for value in called.args]
    passed = dict(zip(ARGUMENTS, args, strict=False))
    registers = {**passed, **links, "pc": called.function, "sp": frame}
    return CallSetup(registers=registers, words=tuple(args[len(ARGUMENTS) :]))


def _skip_trap(read: Read, registers: Mapping[str, int]) -> Mapping[str, int]:
    (word,) = _words(read(registers["pc"], 4))
    if word == _MASK:
        return {"pc": registers["pc"] + 4, "cpsr": registers["cpsr"] | _DAIF}
    return {"pc": registers[f"x{first_register(word)}"], "x30": registers["pc"] + 4}


def _code(memory: MappedMemory, kernel: Kernel, request: CodeRequest) -> FunctionCall:
    # module_alloc and execmem_alloc go where ``b`` from the text does not reach.
    stop = address_of(kernel, "_stext")
    if stop is not None:
        # What only boot uses comes after data.
        last = max(text[1] for text in kernel.texts)
        start = max(stop - _REACH, last - REACH)
        protection = _known(memory).attributes(request.like)
        called = alloc_between(kernel, request, start=start, stop=stop, protection=protection)
        if called is not None:
            return called
    raise TargetError(f"kernel {kernel.release} has no __vmalloc_node_range or no _stext")


INJECT_OPS = InjectOps(
    pc="pc",
    result="x0",
    number="x28",
    switch="invoke_syscall",
    system_call="__arm64_sys_",
    idle=_IDLE,
    # Interrupts are masked there: one that comes ends the sleep all the same.
    can_leave_idle=lambda _registers: True,
    takes_interrupts=lambda registers: not registers["cpsr"] & _IRQS_OFF,
    return_path=_return_path,
    save_frame=_save_frame,
    set_up_call=_set_up_call,
    at_trap=_at_trap,
    returned_frame=lambda registers: registers["sp"],
    skip_trap=_skip_trap,
    timer_message=lambda _memory, _kernel, _handlers: None,
    code=_code,
    module_code=alloc_like_module,
    page_size=lambda memory: 1 << _known(memory).layout.shift,
    free_code=("vfree",),
)
