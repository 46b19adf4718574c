"""amd64 guests: programs and code written by hand, in Intel's syntax."""

from msgspec.structs import replace

from bench.assembly import assemble
from bench.isa import TASK_AT, Alone, ByHand, Gdb, Goals, Isa, Many, Middle, Programs
from kprobes.arch.x86_64.arch import X86_64
from kprobes.model.abi import GuestAbi
from kprobes.model.plan import Strategy

_PROGRAM = """
    cmp byte ptr [rip + path], 0
    {forks}
    mov r14d, 1
run:
    mov qword ptr [{times}], r14
    mov eax, 203
    xor edi, edi
    mov esi, 8
    mov edx, {times}
    syscall
    {setup}
    mov r12d, {repeats}
    mov r13d, {times}
repeat:
    mov rsi, r13
    call now
    mov ebx, {steps}
again:
    {step}
    dec ebx
    jnz again
    lea rsi, [r13 + 16]
    call now
    add r13, 32
    dec r12d
    jnz repeat
    mov eax, 1
    mov edi, 1
    mov esi, {times}
    mov edx, {size}
    syscall
    {waits}
    mov eax, 60
    xor edi, edi
    syscall
now:
    mov eax, 228
    mov edi, 1
    syscall
    ret
file:
    .asciz "{file}"
path:
    .asciz "{path}"
    .balign 64
body:
"""
_FORK = """
    mov eax, 57
    syscall
    mov r14d, {mask}
    test eax, eax
    jz run
"""
_WAIT = """
    mov eax, 61
    mov rdi, -1
    xor esi, esi
    xor edx, edx
    xor r10d, r10d
    syscall
"""
_GETPPID = """
    mov eax, 110
    syscall
"""
# eventfd2(0, 0); ppoll() of so many struct pollfd for POLLIN, with no time to wait.
_POLL = Many(
    setup="""
    mov eax, 290
    xor edi, edi
    xor esi, esi
    syscall
    movabs rdi, {array}
    mov ecx, {count}
fill:
    mov [rdi], eax
    mov dword ptr [rdi + 4], 1
    add rdi, 8
    dec ecx
    jnz fill
""",
    step="""
    mov eax, 271
    movabs rdi, {array}
    mov esi, {count}
    movabs rdx, {none}
    xor r10d, r10d
    syscall
""",
)
# openat(AT_FDCWD, file, O_WRONLY); writev() of so many struct iovec.
_WRITEV = Many(
    setup="""
    mov eax, 257
    mov rdi, -100
    lea rsi, [rip + file]
    mov edx, 1
    xor r10d, r10d
    syscall
    mov r15, rax
    movabs rdi, {array}
    mov ecx, {count}
    lea rsi, [rip + path]
fill:
    mov [rdi], rsi
    mov qword ptr [rdi + 8], 20
    add rdi, 16
    dec ecx
    jnz fill
""",
    step="""
    mov eax, 20
    mov rdi, r15
    movabs rsi, {array}
    mov edx, {count}
    syscall
""",
)

# At a function's entry rax, r10, r11 and the flags are dead, so they are not saved. rcx and rdx
# hold the probed function's fourth and third argument: rdtsc and the arithmetic need them.
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
    mov rdx, [rax + {comm_half}]
    mov [r11 + {comm_half_at}], rdx
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


def _field(number: int, place: int) -> str:
    # The third argument is what was pushed first.
    source = ("rdi", "rsi", "[rsp + 8]")[number]
    if source.startswith("["):
        return f"mov rdx, {source}\nmov [r11 + {place}], rdx"
    return f"mov [r11 + {place}], {source}"


_PERCPU, _CURRENT, _PREEMPT = 0x80, 0x100, 0x108
_PREEMPTION_OFF = 1 << 31
# arch_prctl(ARCH_SET_GS); the ring's pages are touched once.
_SETUP = f"""
    mov eax, 158
    mov edi, 0x1001
    movabs rsi, {{data}}
    syscall
    mov r15, rsi
    lea rax, [r15 + {TASK_AT}]
    mov [r15 + {_CURRENT}], rax
    mov dword ptr [r15 + {_PREEMPT}], {_PREEMPTION_OFF}
    movabs rdi, {{ring}}
    mov ecx, {{touched}}
    xor eax, eax
    rep stosb
"""
_DRAIN = f"""
    mov rax, [r15 + {_PERCPU} + {{word}}]
    add rax, {{ring_size}}
    mov [r15 + {_PERCPU} + {{limit}}], rax
"""


def _user_abi(abi: GuestAbi) -> GuestAbi:
    task = replace(abi.task, current=_CURRENT, preempt_count=_PREEMPT)
    return replace(abi, task=task, percpu=_PERCPU)


AMD64 = Isa(
    name="amd64",
    elf=X86_64.machine.elf,
    assemble=assemble,
    syscall="__x64_sys_",
    first="di",
    gdb=Gdb(program="gdb", architecture="i386:x86-64", register="rdi"),
    programs=Programs(
        whole=_PROGRAM,
        fork=_FORK,
        wait=_WAIT,
        getppid=_GETPPID,
        poll=_POLL,
        writev=_WRITEV,
    ),
    by_hand=ByHand(probe=_PROBE, migration=_MIGRATION, field=_field, registers={}),
    alone=Alone(
        setup=_SETUP,
        drain=_DRAIN,
        call="call body",
        abi=_user_abi,
        arch=lambda arch: arch,
        registers={},
    ),
    middles=(
        Middle(strategy=Strategy.BREAKPOINT, peer="int3 kprobe", goal=3, is_optimised=False),
        Middle(strategy=Strategy.JUMP, peer="optimised kprobe", goal=15, is_optimised=True),
    ),
    goals=Goals(entry=20, string=10, rejected=100, retinsn=15, rethook=8, pair=15),
)
"""An x86-64 guest."""
