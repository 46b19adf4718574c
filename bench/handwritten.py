"""The code of a probe as a person would write it: same record, same reservation, no compiler.

At a function's entry rax, r10, r11 and the flags are dead, so they are not saved.
"""

from bench.assembly import assemble
from kprobes.model.abi import (
    CPU_SHIFT,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_WORD,
    SLACK,
    GuestAbi,
    Template,
)
from kprobes.model.layout import COMM, COUNTER, EVENT_BITS, HEADER, PID

# rcx and rdx hold the probed function's fourth and third argument: rdtsc and the arithmetic need
# them.
_PROBE = """
    push rdx
    push rcx
retry:
    mov rax, gs:[{word}]
    lea r10, [rax + {size}]
    mov r11, gs:[{limit}]
    sub r11, r10
    cmp r11, {ring_size}
    ja far
    cmpxchg gs:[{word}], r10
    jne retry
    mov r10, rax
    mov r11, rax
    shr r11, {cpu_shift}
    imul r11, r11, {stride}
    and eax, {ring_mask}
    add r11, rax
    mov rax, {rings}
    add r11, rax
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov [r11 + {counter}], rax
    {fields}
    mov rax, gs:[{current}]
    xor edx, edx
    pushfq
    pop rdx
    shl edx, 15
    and edx, 0x1000000
    or edx, gs:[{preempt}]
    mov ecx, [rax + {flags}]
    and ecx, {resched}
    shl ecx, 22
    or edx, ecx
    {migration}
    mov ecx, [rax + {pid}]
    shl rdx, 32
    or rdx, rcx
    mov [r11 + {pid_at}], rdx
    mov rdx, [rax + {comm}]
    mov [r11 + {comm_at}], rdx
    mov rdx, [rax + {comm} + 8]
    mov [r11 + {comm_at} + 8], rdx
    shl r10, {event_bits}
    or r10, offset event0
    mov [r11], r10
    pop rcx
    pop rdx
    ret
far:
    add r11, r10
    xor r11, rax
    shr r11, {cpu_shift}
    jne retry
    inc qword ptr gs:[{lost}]
    pop rcx
    pop rdx
    ret
"""
_MIGRATION = """
    movzx ecx, word ptr [rax + {offset}]
    and ecx, 15
    shl ecx, 27
    or edx, ecx
"""


def registers_record(abi: GuestAbi, arguments: int) -> Template:
    """Return code that records the first 1 to 3 arguments as 64-bit numbers."""
    task, migration = abi.task, ""
    if task.migration_disabled is not None:
        offset, size = task.migration_disabled
        if size != 2:
            raise ValueError(f"migration_disabled of {size} bytes")
        migration = _MIGRATION.format(offset=offset)
    text = _PROBE.format(
        word=abi.percpu + PERCPU_WORD,
        size=HEADER + 8 * arguments,
        limit=abi.percpu + PERCPU_LIMIT,
        lost=abi.percpu + PERCPU_LOST,
        cpu_shift=CPU_SHIFT,
        stride=abi.ring_size + SLACK,
        rings=abi.rings,
        ring_size=abi.ring_size,
        ring_mask=abi.ring_size - 1,
        counter=COUNTER,
        current=task.current,
        pid=task.pid,
        pid_at=PID,
        preempt=task.preempt_count,
        flags=task.flags,
        resched=task.resched_mask,
        migration=migration,
        comm=task.comm,
        comm_at=COMM,
        event_bits=EVENT_BITS,
        fields="\n".join(_field(number) for number in range(arguments)),
    )
    return assemble(text)


def _field(number: int) -> str:
    # The third argument is what was pushed first.
    place, source = HEADER + 8 * number, ("rdi", "rsi", "[rsp + 8]")[number]
    if source.startswith("["):
        return f"mov rdx, {source}\nmov [r11 + {place}], rdx"
    return f"mov [r11 + {place}], {source}"
