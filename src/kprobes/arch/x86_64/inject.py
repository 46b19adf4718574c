"""Injected calls on x86-64.

Stack of the task, from low to high addresses; the function returns to the first word:

    u64 trap;        // a ``ret`` in a function that is never called: a place of our own to stop at
    u64 spare[];     // arguments beyond the sixth, where a kernel must be given such
    u64 irqs_off;    // ``cli`` and ``ret``
    u64 finish;      // restore_regs_and_return_to_kernel
    pt_regs frame;   // what the task was doing

Interrupts are switched off, as they are wherever the kernel itself returns from an interrupt: one
that came at the very ``iret`` would be taken for a fault of the ``iret`` (error_entry in
arch/x86/entry/entry_64.S), and the guest would crash. The return gives the task its registers back.

Code: module_alloc until 6.9; execmem since 12af2b83d0b1 ("mm: introduce execmem_alloc() and
execmem_free()") (v6.10). Kernels without modules may have neither. What these are made of takes
nine arguments, three of them on the stack, so there the trap is the end of a rare function that
takes three registers off it, and then returns.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

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
from kprobes.arch.x86_64.paging import PageTables
from kprobes.arch.x86_64.registers import ARGUMENTS, NAMES, STUB_NAMES
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import U64, Addr, Phys

_WORD = 8
_RED = 256
_PAGE = 4096
_IRQS_ON = 1 << 9
_RET = re.compile(rb"\xc3")
_POPS = 3
_POPS_RET = re.compile(rb"(?:\x41[\x5c-\x5f]|[\x5b\x5d]){3}\xc3")
"""Of registers that functions leave as they were: ``pop %rbx``, ``%rbp``, ``%r12`` to ``%r15``."""
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
_RARE = ("__do_sys_reboot", "__do_sys_pivot_root", "__x64_sys_pivot_root", "__do_sys_swapoff")
"""A task that comes to a trap and is not ours is moved past it."""
_FINISH = "restore_regs_and_return_to_kernel"
_IRQS_OFF = ("pv_native_irq_disable", "native_irq_disable")
"""``cli`` and a return, in kernels that can be a Xen guest."""
_ENDBR = b"\xf3\x0f\x1e\xfa"
_LONGEST_PATCH = 5
_REX_B, _INT3 = 0x41, 0xCC
_NUMBERED = (
    "rax",
    "rcx",
    "rdx",
    "rbx",
    "rsp",
    "rbp",
    "rsi",
    "rdi",
    *(f"r{n}" for n in range(8, 16)),
)
"""As instructions number them."""
_PATCHED = (0xE8, 0xE9, 0xEB, 0x0F, 0x66, 0x90, 0x2E)
"""Bytes that calls, jumps and nops begin with: the kernel may change them at any time."""
_IDLE = ("default_idle", "native_safe_halt", "pv_native_safe_halt", "acpi_safe_halt", "mwait_idle")
_LAPIC_TIMER = "lapic_events"
"""Per CPU: its own timer, whose handler is called by the interrupt of ``_TIMER_VECTOR``."""
_MESSAGE = Phys(0xFEE0_0000)
"""Intel SDM volume 3, section 11.11: a word that is written there is an interrupt for CPU 0."""
_TIMER_VECTOR = 0xEC
_MODULES = (0xFFFF_FFFF_C000_0000, 0xFFFF_FFFF_FF00_0000)
"""MODULES_VADDR with KASLR, and MODULES_END: there also in kernels without modules."""


def _return_path(memory: MappedMemory, kernel: Kernel) -> ReturnPath:
    finish = address_of(kernel, _FINISH)
    if finish is None:
        raise TargetError(f"kernel {kernel.release} has no {_FINISH}")
    has_room = alloc_like_module(kernel, 0) is None
    rare = (_RARE, _POPS_RET) if has_room else (_UNCALLED, _RET)
    return ReturnPath(
        trap=_trap(memory, kernel, *rare),
        then=(_irqs_off(memory, kernel), finish),
        spare=_POPS if has_room else 0,
    )


def _trap(
    memory: MappedMemory, kernel: Kernel, names: Iterable[str], code: re.Pattern[bytes]
) -> Addr:
    for symbol in map(kernel.symbols.find, names):
        if symbol is None:
            continue
        found = code.search(memory.read(symbol.addr, min(symbol.size, _PAGE)))
        if found is not None:
            return Addr(symbol.addr + found.start())
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
    words = [return_path.trap, *[0] * return_path.spare, *return_path.then]
    words += [registers.get(STUB_NAMES.get(name, ""), 0) for name in NAMES]
    base = (registers["rsp"] - _RED - _WORD * len(words)) & ~15
    return base + _WORD, b"".join(word.to_bytes(_WORD, "little") for word in words)


def _set_up_call(return_path: ReturnPath, frame: int, called: FunctionCall) -> CallSetup:
    registers = _arguments(called) | {"rsp": frame, "rax": 0}
    further = [value & U64 for value in called.args[len(ARGUMENTS) :]]
    if len(further) > return_path.spare:
        raise ValueError(f"no room for {len(called.args)} arguments")
    return CallSetup(registers=registers, words=(return_path.trap, *further))


def _at_trap(
    return_path: ReturnPath, frame: int, _registers: Mapping[str, int]
) -> Mapping[str, int]:
    return {"rip": return_path.trap, "rsp": frame + _WORD}


def _arguments(called: FunctionCall) -> dict[str, int]:
    names = (STUB_NAMES[name] for name in ARGUMENTS)
    registers = {name: value & U64 for name, value in zip(names, called.args, strict=False)}
    return registers | {"rip": called.function}


def _skip_trap(read: Read, registers: Mapping[str, int]) -> Mapping[str, int]:
    top = int.from_bytes(read(registers["rsp"], _WORD), "little")
    after = {"rsp": registers["rsp"] + _WORD}
    code = read(registers["rip"], 2)
    # Under KVM a stub shows its own breakpoint there.
    if _RET.match(code) or code[0] == _INT3:
        return after | {"rip": top}
    is_wide = code[0] == _REX_B
    register = _NUMBERED[8 * is_wide + code[is_wide] % 8]
    return after | {register: top, "rip": registers["rip"] + 1 + is_wide}


def _timer_message(
    memory: MappedMemory, kernel: Kernel, handlers: Collection[int]
) -> tuple[Phys, bytes] | None:
    offsets, timer = kernel.symbols.find("__per_cpu_offset"), kernel.symbols.find(_LAPIC_TIMER)
    if offsets is None or timer is None:
        return None
    # struct clock_event_device { void (*event_handler)(struct clock_event_device *); ... };
    handler = _u64(memory, _u64(memory, offsets.addr) + timer.addr & U64)
    return (_MESSAGE, _TIMER_VECTOR.to_bytes(4, "little")) if handler in handlers else None


def _u64(memory: MappedMemory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, _WORD), "little")


def _code(memory: MappedMemory, kernel: Kernel, request: CodeRequest) -> FunctionCall:
    called = alloc_like_module(kernel, request.size)
    if called is not None:
        return called
    start, stop = _MODULES
    protection = _known(memory).attributes(request.like)
    called = alloc_between(kernel, request, start=start, stop=stop, protection=protection)
    if called is None:
        raise TargetError(f"kernel {kernel.release} has no module_alloc, nor __vmalloc_node_range")
    return called


def _known(memory: MappedMemory) -> PageTables:
    if not isinstance(memory.tables, PageTables):
        raise TypeError(f"{memory.tables!r} are not tables of this architecture")
    return memory.tables


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
    at_trap=_at_trap,
    returned_frame=lambda registers: registers["rsp"] - _WORD,
    skip_trap=_skip_trap,
    timer_message=_timer_message,
    code=_code,
    module_code=None,
    page_size=lambda _memory: _PAGE,
    free_code=("execmem_free", "module_memfree", "vfree"),
)
