"""A probe's code alone: called in a loop in user space, where nothing else costs anything.

The code is compiled as for the kernel; the words that it uses lie in the program's own memory.
"""

from dataclasses import replace

from bench.elf_program import DATA, Loop
from kprobes.model.abi import PERCPU_LIMIT, PERCPU_WORD, GuestAbi, Template
from kprobes.units import MIB, Addr

_PERCPU, _CURRENT, _PREEMPT = 0x80, 0x100, 0x108
_TASK, _RING = DATA + 0x2000, DATA + 0x10000
_RING_SIZE = 4 * MIB
_BODY = Addr(0x400400)
_PREEMPTION_OFF = 1 << 31

# arch_prctl(ARCH_SET_GS); the ring's pages are touched once.
_SETUP = f"""
    mov eax, 158
    mov edi, 0x1001
    movabs rsi, {DATA}
    syscall
    mov r15, rsi
    lea rax, [r15 + {_TASK - DATA}]
    mov [r15 + {_CURRENT}], rax
    mov dword ptr [r15 + {_PREEMPT}], {_PREEMPTION_OFF}
    lea rdi, [r15 + {_RING - DATA}]
    mov ecx, {_RING_SIZE + 4096}
    xor eax, eax
    rep stosb
"""
# What the host does: whatever was recorded is taken out.
_DRAIN = f"""
    mov rax, [r15 + {_PERCPU + PERCPU_WORD}]
    add rax, {_RING_SIZE}
    mov [r15 + {_PERCPU + PERCPU_LIMIT}], rax
"""


def user_abi(abi: GuestAbi) -> GuestAbi:
    """Return the constants that code needs to run in such a program."""
    task = replace(abi.task, current=_CURRENT, preempt_count=_PREEMPT)
    return replace(
        abi, task=task, percpu=_PERCPU, rings=Addr(_RING), ring_size=_RING_SIZE, clock=None
    )


def loop(code: Template | None, *, steps: int, repeats: int) -> Loop:
    """Return a program that calls code, or nothing, in a loop."""
    step = _DRAIN if code is None else f"{_DRAIN}call body"
    names = {relocation.symbol for relocation in code.relocations} if code else set[str]()
    # Neither branch nor reader is taken: only the event's number is of any use.
    body = b"" if code is None else code.link(_BODY, dict.fromkeys(names, 1))
    return Loop(step=step, steps=steps, repeats=repeats, setup=_SETUP, body=body)
