"""Injected calls on x86-64.

Stack of the task, from low to high addresses; the function returns to the first word:

    u64 trap;        // a ``ret`` in a function that is never called: a place of our own to stop at
    u64 irqs_off;    // ``cli`` and ``ret``
    u64 finish;      // restore_regs_and_return_to_kernel
    pt_regs frame;   // what the task was doing

Interrupts are switched off, as they are wherever the kernel itself returns from an interrupt: one
that came at the very ``iret`` would be taken for a fault of the ``iret`` (error_entry in
arch/x86/entry/entry_64.S), and the guest would crash. The return gives the task its registers back.

Code: module_alloc until 6.9; execmem since 12af2b83d0b1 ("mm: introduce execmem_alloc() and
execmem_free()") (v6.10).
"""

from collections.abc import Iterator, Mapping

from kprobes.arch.insn import Read
from kprobes.arch.machine import (
    CallSetup,
    CodeRequest,
    FunctionCall,
    InjectOps,
    MappedMemory,
    ReturnPath,
    address_of,
    alloc_like_module,
)
from kprobes.arch.x86_64.registers import ARGUMENTS, NAMES, STUB_NAMES
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import U64, Addr

_WORD = 8
_RED = 256
_PAGE = 4096
_IRQS_ON = 1 << 9
_RET = 0xC3
_CLI_RET = b"\xfa\xc3"
_CLI = 0xFA
_UNCALLED = (
    "orderly_reboot",
    "orderly_poweroff",
    "unregister_reboot_notifier",
    "unregister_die_notifier",
    "kernel_restart",
    "emergency_restart",
)
_FINISH = "restore_regs_and_return_to_kernel"
_IRQS_OFF = ("pv_native_irq_disable", "native_irq_disable")
"""``cli`` and a return, in kernels that can be a Xen guest."""
_ENDBR = b"\xf3\x0f\x1e\xfa"
_LONGEST_PATCH = 5
_PATCHED = (0xE8, 0xE9, 0xEB, 0x0F, 0x66, 0x90, 0x2E)
"""Bytes that calls, jumps and nops begin with: the kernel may change them at any time."""
_IDLE = ("default_idle", "native_safe_halt", "pv_native_safe_halt", "acpi_safe_halt", "mwait_idle")
_APIC_ICR = 0x300
_TO_SELF = 0x40000
_TIMER_VECTOR = 0xEC


def _return_path(memory: MappedMemory, kernel: Kernel) -> ReturnPath:
    finish = address_of(kernel, _FINISH)
    if finish is None:
        raise TargetError(f"kernel {kernel.release} has no {_FINISH}")
    return ReturnPath(trap=_trap(memory, kernel), then=(_irqs_off(memory, kernel), finish))


def _trap(memory: MappedMemory, kernel: Kernel) -> Addr:
    for name in _UNCALLED:
        symbol = kernel.symbols.find(name)
        if symbol is None:
            continue
        at = memory.read(symbol.addr, min(symbol.size, _PAGE)).find(_RET)
        if at >= 0:
            return Addr(symbol.addr + at)
    raise TargetError("no place to return to was found in this kernel's text")


def _irqs_off(memory: MappedMemory, kernel: Kernel) -> Addr:
    for name in _IRQS_OFF:
        symbol = kernel.symbols.find(name)
        if symbol is not None:
            code = memory.read(symbol.addr, 8)
            start = len(_ENDBR) if code.startswith(_ENDBR) else 0
            if code[start] == _CLI:
                return Addr(symbol.addr + start)
    for addr in _cli_rets(memory, kernel):
        return addr
    raise TargetError("no place that switches interrupts off was found in this kernel's text")


def _cli_rets(memory: MappedMemory, kernel: Kernel) -> Iterator[Addr]:
    # These two bytes, wherever they are, as long as nobody patches them.
    start, stop = kernel.text
    for chunk in range(start, stop, _PAGE):
        try:
            code = memory.read(chunk, min(_PAGE, stop - chunk))
        except MemoryFault:
            continue
        at = code.find(_CLI_RET, _LONGEST_PATCH)
        while at >= 0:
            if not any(byte in _PATCHED for byte in code[at - _LONGEST_PATCH : at]):
                yield Addr(chunk + at)
            at = code.find(_CLI_RET, at + 1)


def _save_frame(return_path: ReturnPath, registers: Mapping[str, int]) -> tuple[int, bytes]:
    words = [return_path.trap, *return_path.then]
    words += [registers.get(STUB_NAMES.get(name, ""), 0) for name in NAMES]
    base = (registers["rsp"] - _RED - _WORD * len(words)) & ~15
    return base + _WORD, b"".join(word.to_bytes(_WORD, "little") for word in words)


def _set_up_call(return_path: ReturnPath, frame: int, called: FunctionCall) -> CallSetup:
    registers = _arguments(called) | {"rsp": frame, "rax": 0}
    return CallSetup(registers=registers, words=(return_path.trap,))


def _set_up_jump(return_path: ReturnPath, frame: int, called: FunctionCall) -> CallSetup:
    del return_path
    return CallSetup(registers=_arguments(called) | {"rsp": frame + _WORD})


def _at_trap(return_path: ReturnPath, frame: int) -> Mapping[str, int]:
    return {"rip": return_path.trap, "rsp": frame + _WORD}


def _arguments(called: FunctionCall) -> dict[str, int]:
    names = (STUB_NAMES[name] for name in ARGUMENTS)
    registers = {name: value & U64 for name, value in zip(names, called.args, strict=False)}
    return registers | {"rip": called.function}


def _skip_trap(read: Read, registers: Mapping[str, int]) -> Mapping[str, int]:
    following = int.from_bytes(read(registers["rsp"], _WORD), "little")
    return {"rip": following, "rsp": registers["rsp"] + _WORD}


def _raise_timer(memory: MappedMemory, kernel: Kernel) -> FunctionCall | None:
    # A message to itself: one write to its APIC by a function that does nothing else.
    apic = kernel.symbols.find("apic")
    if apic is None or kernel.types is None:
        return None
    place = _u64(memory, apic.addr) + kernel.types.offset("apic", "write")
    return FunctionCall(
        function=Addr(_u64(memory, place)), args=(_APIC_ICR, _TO_SELF | _TIMER_VECTOR)
    )


def _u64(memory: MappedMemory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, _WORD), "little")


def _code(memory: MappedMemory, kernel: Kernel, request: CodeRequest) -> FunctionCall:
    del memory
    called = alloc_like_module(kernel, request.size)
    if called is None:
        raise TargetError(f"kernel {kernel.release} has no module_alloc")
    return called


def _takes_interrupts(registers: Mapping[str, int]) -> bool:
    return bool(registers["eflags"] & _IRQS_ON)


INJECT_OPS = InjectOps(
    pc="rip",
    result="rax",
    number="r15",
    switch="x64_sys_call",
    system_call="__x64_sys_",
    idle=_IDLE,
    can_leave_idle=_takes_interrupts,
    takes_interrupts=_takes_interrupts,
    return_path=_return_path,
    save_frame=_save_frame,
    set_up_call=_set_up_call,
    set_up_jump=_set_up_jump,
    at_trap=_at_trap,
    returned_frame=lambda registers: registers["rsp"] - _WORD,
    skip_trap=_skip_trap,
    raise_timer=_raise_timer,
    code=_code,
    module_code=None,
    page_size=lambda _memory: _PAGE,
    free_code=("execmem_free", "module_memfree"),
)
