"""arm64 guests: programs and code written by hand, in the syntax of bench/a64.py."""

from msgspec.structs import replace

from bench.a64 import assemble
from bench.isa import TASK_AT, Alone, ByHand, Gdb, Goals, Isa, Many, Middle, Programs
from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch, Base
from kprobes.model.abi import PERCPU_LOST, GuestAbi
from kprobes.model.plan import Strategy

_PROGRAM = """
    adr x0, path
    ldr x1, [x0]
    {forks}
    mov x22, #1
run:
    mov x2, #{times}
    str x22, [x2]
    mov x8, #122
    mov x0, #0
    mov x1, #8
    svc #0
    {setup}
    mov x19, #{repeats}
    mov x20, #{times}
repeat:
    mov x1, x20
    bl now
    mov x21, #{steps}
again:
    {step}
    subs x21, x21, #1
    b.ne again
    add x1, x20, #16
    bl now
    add x20, x20, #32
    subs x19, x19, #1
    b.ne repeat
    mov x8, #64
    mov x0, #1
    mov x1, #{times}
    mov x2, #{size}
    svc #0
    {waits}
    mov x8, #93
    mov x0, #0
    svc #0
now:
    mov x8, #113
    mov x0, #1
    svc #0
    ret x30
file:
    .asciz "{file}"
path:
    .asciz "{path}"
    .balign 64
body:
"""
# clone(SIGCHLD).
_FORK = """
    mov x8, #220
    mov x0, #17
    mov x1, #0
    mov x2, #0
    mov x3, #0
    mov x4, #0
    svc #0
    mov x22, #{mask}
    cbz x0, run
"""
_WAIT = """
    mov x8, #260
    mov x0, #-1
    mov x1, #0
    mov x2, #0
    mov x3, #0
    svc #0
"""
_GETPPID = """
    mov x8, #173
    svc #0
"""
# eventfd2(0, 0); ppoll() of so many struct pollfd for POLLIN, with no time to wait.
_POLL = Many(
    setup="""
    mov x8, #19
    mov x0, #0
    mov x1, #0
    svc #0
    mov x1, #{array}
    mov x2, #{count}
    mov x3, #1
fill:
    str w0, [x1]
    str w3, [x1, #4]
    add x1, x1, #8
    subs x2, x2, #1
    b.ne fill
""",
    step="""
    mov x8, #73
    mov x0, #{array}
    mov x1, #{count}
    mov x2, #{none}
    mov x3, #0
    svc #0
""",
)
# openat(AT_FDCWD, file, O_WRONLY); writev() of so many struct iovec.
_WRITEV = Many(
    setup="""
    mov x8, #56
    mov x0, #-100
    adr x1, file
    mov x2, #1
    mov x3, #0
    svc #0
    mov x23, x0
    mov x1, #{array}
    mov x2, #{count}
    adr x3, path
    mov x4, #20
fill:
    str x3, [x1]
    str x4, [x1, #8]
    add x1, x1, #16
    subs x2, x2, #1
    b.ne fill
""",
    step="""
    mov x8, #66
    mov x0, x23
    mov x1, #{array}
    mov x2, #{count}
    svc #0
""",
)

# Where the site's call comes to, x9 has where the function returns to, x30 where it goes on; x10 to
# x17 and the flags are dead.
_PROBE = f"""
retry:
    mrs x10, {{base}}
    mov x11, #{{percpu}}
    add x10, x10, x11
    ldp x11, x12, [x10]
    add x13, x11, #{{size}}
    sub x12, x12, x13
    mov x14, #{{ring_size}}
    cmp x12, x14
    b.hi far
    mov x15, x11
    casal x15, x13, [x10]
    cmp x15, x11
    b.ne retry
    lsr x12, x11, #{{cpu_shift}}
    mov x13, #{{stride}}
    mov x14, #{{rings}}
    madd x12, x12, x13, x14
    ubfx x14, x11, #0, #{{ring_bits}}
    add x12, x12, x14
    mrs x13, cntvct_el0
    str x13, [x12, #{{counter}}]
    {{fields}}
    mrs x13, {{task}}
    ldr x15, [x13, #{{preempt}}]
    lsr x16, x15, #32
    orr x15, x15, x16, lsl #31
    mrs x16, {{masks}}
    mov x17, #0x80
    eor x16, x16, x17
    ubfx x16, x16, #7, #1
    orr x15, x15, x16, lsl #24
    ldr w16, [x13, #{{flags}}]
    ubfx x16, x16, #{{resched_at}}, #{{resched_bits}}
    orr x15, x15, x16, lsl #25
    {{migration}}
    ldr w16, [x13, #{{pid}}]
    orr x16, x16, x15, lsl #32
    str x16, [x12, #{{pid_at}}]
    ldr x14, [x13, #{{comm}}]
    str x14, [x12, #{{comm_at}}]
    ldr x14, [x13, #{{comm_half}}]
    str x14, [x12, #{{comm_half_at}}]
    lsl x11, x11, #{{event_bits}}
    movz x13, event0
    orr x11, x11, x13
    stlr x11, [x12]
    mov x10, x30
    mov x30, x9
    ret x10
far:
    add x12, x12, x13
    eor x12, x12, x11
    lsr x12, x12, #{{cpu_shift}}
    cbnz x12, retry
    add x10, x10, #{PERCPU_LOST}
    mov x11, #1
    stadd x11, [x10]
    mov x10, x30
    mov x30, x9
    ret x10
"""
_MIGRATION = """
    ldrh w16, [x13, #{offset}]
    ubfx x16, x16, #0, #4
    orr x15, x15, x16, lsl #27
"""


def _field(number: int, place: int) -> str:
    return f"str x{number}, [x12, #{place}]"


_PERCPU = 0x8000
"""Of a program's per-CPU words, from its task on: one register has the base of both."""
_SETUP = f"""
    mov x23, #{{data}}
    mov x0, #{TASK_AT}
    add x23, x23, x0
    msr tpidr_el0, x23
    mov x0, #{_PERCPU}
    add x23, x23, x0
    mov x0, #{{ring}}
    mov x1, #{{touched}}
touch:
    str x0, [x0]
    add x0, x0, #8
    subs x1, x1, #8
    b.ne touch
"""
_DRAIN = """
    ldr x0, [x23, #{word}]
    mov x1, #{ring_size}
    add x0, x0, x1
    str x0, [x23, #{limit}]
"""
# As a site calls.
_CALL = """
    mov x9, x30
    bl body
"""


def _user_arch(arch: Arch) -> Arch:
    base = 'call i64 @llvm.read_volatile_register.i64(metadata !{!"tpidr_el0"})'
    masks = base.replace("tpidr_el0", "nzcv")
    code = replace(arch.code, per_cpu=Base(expression=base), current=base, flags=masks)
    return replace(arch, code=code)


def _user_abi(abi: GuestAbi) -> GuestAbi:
    return replace(abi, percpu=_PERCPU)


ARM64 = Isa(
    name="arm64",
    elf=AARCH64.machine.elf,
    assemble=assemble,
    syscall="__arm64_sys_",
    first="x0",
    gdb=Gdb(program="gdb-multiarch", architecture="aarch64", register="x0"),
    programs=Programs(
        whole=_PROGRAM,
        fork=_FORK,
        wait=_WAIT,
        getppid=_GETPPID,
        poll=_POLL,
        writev=_WRITEV,
    ),
    by_hand=ByHand(
        probe=_PROBE,
        migration=_MIGRATION,
        field=_field,
        registers={"base": "tpidr_el1", "task": "sp_el0", "masks": "daif"},
    ),
    alone=Alone(
        setup=_SETUP,
        drain=_DRAIN,
        call=_CALL,
        abi=_user_abi,
        arch=_user_arch,
        registers={"base": "tpidr_el0", "task": "tpidr_el0", "masks": "nzcv"},
    ),
    middles=(Middle(strategy=Strategy.JUMP, peer="brk kprobe", goal=10, is_optimised=None),),
    goals=Goals(entry=10, string=10, rejected=10, retinsn=8, rethook=8, pair=8),
)
"""An arm64 guest."""
