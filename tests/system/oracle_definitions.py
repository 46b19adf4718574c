"""Definitions that the oracle arms: all forms and types of the first part, on real functions.

``{STRUCT.MEMBER}`` is an offset in the guest's types, ``{SYMBOL}`` an address. What is of one
architecture only stands apart: its registers, arguments on the stack, and its system calls, whose
arguments are in the registers of user mode.
"""

import re
from collections.abc import Iterator

from kprobes.model.kernel import Kernel
from tests.build.words import WORDS, debian_name

_TEXT = r"""
p:o_args do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring flags=+0($arg3):x64 mode=+8($arg3):u16
p:o_user do_sys_openat2 a=+0($arg2):string b=+u0($arg2):string c=+u0($arg2):u8 d=+u1($arg2):x16
p:o_words do_sys_openat2 a=+0($arg2):x32 b=+0($arg2):x64 c=+u0($arg2):s64 d=+u2(%si):s8
p do_sys_openat2 %di %si:u32 \1
p:minus do_sys_openat2 a=-8($arg3):x64 b=-4($arg3):x32 c=-0x10(+0($arg3)):x8
p:comms do_sys_openat2 a=$comm b=$comm:string
p:stack vfs_read sp=$stack s0=$stack0 s1=$stack1 s7=$stack7 s40=$stack40:x32
p:far vfs_read out=$stack2047 edge=$stack2048:s64 near=$stack2:u16
p:unsigned vfs_read a=$arg3:u8 b=$arg3:u16 c=$arg3:u32 d=$arg3:u64 e=$arg1:u8 f=$arg1:u32
p:signed vfs_read a=$arg1:s8 b=$arg1:s16 c=$arg1:s32 d=$arg1:s64 e=$arg3:s8 f=$arg3:s16 g=$arg3:s32
p:hexes vfs_read a=$arg1:x8 b=$arg1:x16 c=$arg1:x32 d=$arg1:x64 e=$arg3 f=$arg1:u64
p:chain vfs_read comm=$comm name=+0(+{dentry.d_name.name}(+{file.f_path.dentry}($arg1))):string
p:type vfs_read n=+0(+0(+{super_block.s_type}(+{inode.i_sb}(+{file.f_inode}(%di))))):string
p:w_args vfs_write file=$arg1 buf=$arg2 count=$arg3:u64 pos=$arg4 mode=+{file.f_mode}($arg1):x32
p:w_user vfs_write a=+u0($arg2):u8 b=+u0($arg2):s8 c=+u0($arg2):x16 d=+0($arg2):u8
p:w_fixed vfs_write a=\42:u8 b=\-1:s64 c=\0x1234:x16 d=\-1:u8 e=\18446744073709551615 f=\070:s32
p:m_args do_mmap file=$arg1 addr=$arg2 len=$arg3:u64 prot=$arg4 flags=$arg5 six=$arg6:u64
p:names vfs_open a=+0(+{dentry.d_name.name}(+{path.dentry}($arg1))):string b=+8(+8(%di)):x64
p:nulls vfs_open a=+0(\0):u64 b=+0(\0):string c=+8(+0(\0)):x32 d=+u0(\0):string e=+u0(\0):s16
p:user_null vfs_open a=+0(\0):ustring b=+0(+u0(\0)):ustring c=-8(\0):string d=+8(\1):u64
p:holes vfs_open a=@0xdead000000000000:string b=@0xdead000000000000:x64 c=+0(\0x800000000000):u8
p:unmapped vfs_open d=+0(\0xffffffffffffff00):string e=+0(\0x10000):x32 f=@0x1000:s8
p:mixed vfs_open a=+0(\0):s32 b=+0(+{dentry.d_name.name}(+{path.dentry}(%di))):string c=+0(\8)
p:symbols wake_up_new_task a=@linux_banner:string b=@linux_banner+6:string c=@linux_proc_banner-8:x8
p:numbers wake_up_new_task a=@init_uts_ns:x32 b=@nr_cpu_ids:u32 c=@init_task+{task_struct.pid}:s32
p:task wake_up_new_task pid=+{task_struct.pid}($arg1):s32 comm=+{task_struct.comm}($arg1):string
p:group wake_up_new_task tgid=+{task_struct.tgid}(%di):u32 cap=+{task_struct.tgid}(%di):s16
p:absolute wake_up_new_task a=@{linux_banner}:string b=@{linux_banner}:x8 c=@{linux_banner}:s64
p:piped pipe_write
p:reads pipe_read iocb=$arg1 iter=$arg2 file=+0($arg1):x64
p:anon_piped anon_pipe_write iocb=$arg1
p:anon_reads anon_pipe_read iocb=$arg1 iter=$arg2 file=+0($arg1):x64
p:exits do_exit code=$arg1:s64 comm=$comm
p:forks kernel_clone flags=+0($arg1):x64 signal=+32($arg1):s32
p:faults handle_mm_fault addr=$arg2 flags=$arg3:x32 ip=%ip comm=$comm
p:getnames getname_flags ptr=$arg1 path=+0($arg1):ustring again=+0($arg1):string flags=$arg2:s32
p:dentry do_dentry_open a=%di b=+0(+{dentry.d_name.name}(+{file.f_path.dentry}($arg1))):string
p:execs begin_new_exec file=+0(+{linux_binprm.filename}($arg1)):string comm=$comm
p:renames __set_task_comm task=$arg1 new=+0($arg2):string exec=$arg3:u8 old=$comm
p:other_group/first security_file_permission mask=$arg2:x32
p:other_group/second security_file_permission mask=$arg2:s32 file=%di
p:third security_file_permission
p:tick update_process_times user=$arg1:s32 comm=$comm
p:soft run_timer_softirq
p:waits do_wait sp=$stack comm=$comm
p:unlinks do_unlinkat dfd=$arg1:s32 name=+0(+0($arg2)):string user=+0(+8($arg2)):ustring
p:statx vfs_statx dfd=$arg1:s32 name=+0(+0($arg2)):string bytes=+0($arg2):x64
"""
_AMD64 = r"""
p:m_stack do_mmap seven=$arg7 eight=$arg8 nine=$arg9 at7=+0($arg7):x64 same=+0($stack1):x32
p:o_regs do_sys_openat2 di=%di si=%si dx=%dx cx=%cx r8=%r8 r9=%r9
p:o_more do_sys_openat2 ax=%ax bx=%bx bp=%bp r10=%r10 r11=%r11 r12=%r12 r13=%r13 r14=%r14 r15=%r15
p:o_state do_sys_openat2 ip=%ip flags=%flags cs=%cs ss=%ss sp=%sp orig=%orig_ax
p:sys_read __x64_sys_read fd=+112($arg1):s32 buf=+104($arg1):x64 count=+96($arg1):u64
p:sys_open __x64_sys_openat path=+0(+104($arg1)):ustring same=+u0(+104(%di)):string
"""
_ARM64 = r"""
p:m_stack do_mmap seven=$arg7 eight=$arg8 at7=+0($arg7):x64 slot=$stack1:x64
p:o_regs do_sys_openat2 a=%x0 b=%x1 c=%x2 d=%x3 e=%x4 f=%x5 g=%x6 h=%x7 i=%x8 j=%x10
p:o_more do_sys_openat2 a=%x11 b=%x12 c=%x13 d=%x14 e=%x15 f=%x16 g=%x17 h=%x18 i=%x19 j=%x20
p:o_rest do_sys_openat2 a=%x21 b=%x22 c=%x23 d=%x24 e=%x25 f=%x26 g=%x27 h=%x28 i=%x29 j=%x30
p:o_state do_sys_openat2 pc=%pc lr=%lr sp=%sp pstate=%pstate x9=%x9
p:sys_read __arm64_sys_read fd=+0($arg1):s32 buf=+8($arg1):x64 count=+16($arg1):u64
p:sys_open __arm64_sys_openat path=+0(+8($arg1)):ustring same=+u0(+8(%x0)):string
"""
_OWN = {"amd64": _AMD64, "arm64": _ARM64}
_HOLE = re.compile(r"\{([\w.]+)\}")


def definitions(kernel: Kernel) -> list[str]:
    """Return those whose function a kernel has, with its numbers filled in."""

    def number(hole: re.Match[str]) -> str:
        return str(_number(hole[1], kernel))

    lines = _lines(debian_name(kernel.arch))
    return [_HOLE.sub(number, line) for line in lines if kernel.symbols.find(line.split()[1])]


def all_lines(arch: str) -> Iterator[str]:
    """Yield all of an architecture's, with some number in every place that wants one."""
    for line in _lines(arch):
        yield _HOLE.sub("8", line)


def _lines(arch: str) -> list[str]:
    text = WORDS[arch].of(_TEXT) + _OWN[arch]
    return [line for line in text.splitlines() if line]


def _number(hole: str, kernel: Kernel) -> int:
    name, _, member = hole.partition(".")
    if not member:
        return kernel.symbols.named(name).addr
    assert kernel.types is not None
    return kernel.types.offset(name, member)
