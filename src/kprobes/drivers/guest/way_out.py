"""The kernel's own code that a borrowed task returns through when its call is done.

First the landing, where it can be stopped. Then interrupts are switched off, as they are wherever
the kernel itself returns from an interrupt: one that came at the very ``iret`` would be taken for
a fault of the ``iret`` (error_entry in arch/x86/entry/entry_64.S), and the guest would crash. Then
that return, which gives the task its registers back.
"""

from collections.abc import Iterator

from kprobes.drivers.guest.layout import first_of
from kprobes.drivers.guest.memory import GuestMemory
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import Addr

_PAGE = 4096
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
_IRQS_OFF = ("pv_native_irq_disable", "native_irq_disable")
"""``cli`` and a return, in kernels that can be a Xen guest."""
_ENDBR = b"\xf3\x0f\x1e\xfa"
_LONGEST_PATCH = 5
_PATCHED = (0xE8, 0xE9, 0xEB, 0x0F, 0x66, 0x90, 0x2E)
"""Bytes that calls, jumps and nops begin with: the kernel may change them at any time."""


def find_landing(memory: GuestMemory, kernel: Kernel) -> Addr:
    """Return a ``ret`` in a function that is never called.

    Raises:
        TargetError: there is none.
    """
    for name in _UNCALLED:
        symbol = kernel.symbols.find(name)
        if symbol is None:
            continue
        at = memory.read(symbol.addr, min(symbol.size, _PAGE)).find(_RET)
        if at >= 0:
            return Addr(symbol.addr + at)
    raise TargetError("no place to return to was found in this kernel's text")


def find_way_out(memory: GuestMemory, kernel: Kernel) -> tuple[Addr, Addr]:
    """Return what follows the landing: a place that switches interrupts off, and the return.

    Raises:
        TargetError: the kernel has none.
    """
    return _irqs_off(memory, kernel), first_of(kernel, "restore_regs_and_return_to_kernel")


def _irqs_off(memory: GuestMemory, kernel: Kernel) -> Addr:
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


def _cli_rets(memory: GuestMemory, kernel: Kernel) -> Iterator[Addr]:
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
