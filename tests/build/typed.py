"""A kernel with types: functions whose parameters are structs in structs, for resolving."""

from kprobes.arch.x86_64.arch import X86_64
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.formats.btf_index import Kind
from kprobes.image.types import BtfTypes
from kprobes.model.resolved import Resolved
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr
from tests.build.btf import BtfBuilder
from tests.build.kernel import TEXT, make_kernel, read, symbol

SIGNED = 1 << 24
"""In an INT's word."""
SYMBOLS = [
    symbol("vfs_read", TEXT),
    symbol("void_fn", TEXT + 0x100),
    symbol("untyped", TEXT + 0x200),
    symbol("many", TEXT + 0x300),
    symbol("wordy", TEXT + 0x400),
    symbol("ext4_sync", TEXT + 0x500, module="ext4"),
    symbol("__this_module", TEXT + 0x9000, type="d", module="ext4"),
    symbol("twice", TEXT + 0x600, module="fuse"),
    symbol("twice", TEXT + 0x680),
    symbol("cleanup_module", TEXT + 0x700, module="fuse"),
    symbol("jiffies", TEXT + 0x8000, type="D"),
    symbol("__traceiter_opened", TEXT + 0x780),
    symbol("__tracepoint_opened", TEXT + 0x8100, type="D"),
    symbol("__traceiter_fuse_opened", TEXT + 0x7A0, module="fuse"),
    symbol("__tracepoint_fuse_opened", TEXT + 0x8180, type="D", module="fuse"),
    symbol("__traceiter_nowhere", TEXT + 0x7C0),
    symbol("this_cpu_off", 0x1A000, type="d"),
    symbol("runqueues", 0x2F000, type="d"),
]


def builder() -> BtfBuilder:
    """Types of a small kernel.

    vfs_read(struct file *file, char *buf, size_t count, enum mode mode, signed char c)
    """
    b = BtfBuilder()
    char, uint, ulong = b.int_("char", 1), b.int_("unsigned int", 4), b.int_("unsigned long", 8)
    int_ = b.add(Kind.INT, "int", 4, words=[32 | SIGNED])
    schar = b.add(Kind.INT, "signed char", 1, words=[8 | SIGNED])
    wide, odd = b.int_("__int128", 16), b.int_("unsigned int", 4, bits=3)
    mode = b.enum("mode", {"READ": 0, "WRITE": 1})
    small = b.add(Kind.ENUM, "small", 1, words=[b.string("TINY"), 1], info=1)
    big = b.enum64("big", {"HUGE": 1 << 40})
    void_ptr, char_ptr = b.ptr(0), b.ptr(b.const(char))
    qstr = b.struct("qstr", 16, [("hash", uint, 0), ("len", uint, 32), ("name", char_ptr, 64)])
    dentry = b.struct("dentry", 64, [
        ("d_flags", uint, 0), ("d_name", qstr, 256), ("d_iname", b.array(char, 8), 384),
    ])  # fmt: skip
    dentry_ptr = b.typedef("dentry_t", b.ptr(b.const(dentry)))
    path = b.struct("path", 16, [("mnt", void_ptr, 0), ("dentry", dentry_ptr, 64)])
    bits = b.struct("bits", 8, [
        ("one", uint, 1 << 24), ("three", int_, 3 << 24 | 9), ("byte", uint, 8 << 24 | 16),
        ("plain", uint, 32),
    ], flag=True)  # fmt: skip
    inner = b.struct("", 8, [("low", uint, 0), ("high", int_, 32)])
    either = b.union("", 8, [("whole", ulong, 0), ("", inner, 0)])
    file_ = b.struct("file", 160, [
        ("f_mode", uint, 0), ("", either, 64), ("f_path", path, 128), ("f_bits", bits, 256),
        ("f_enum", mode, 320), ("f_small", small, 352), ("f_big", big, 384), ("f_wide", wide, 512),
        ("f_odd", odd, 640), ("f_void", void_ptr, 704), ("f_next", b.ptr(b.ptr(int_)), 768),
        ("f_names", b.array(char_ptr, 4), 832), ("f_bytes", b.array(schar, 4), 1088),
    ])  # fmt: skip
    file_ptr = b.ptr(file_)
    b.struct("task_struct", 3000, [
        ("pid", int_, 64), ("se", path, 1024), ("file", file_ptr, 128), ("exit_state", int_, 192),
    ])  # fmt: skip
    b.struct("odd_holder", 8, [("bit", uint, 1 << 24 | 1)], flag=True)
    vfs_read = [("file", file_ptr), ("buf", b.ptr(char)), ("count", ulong), ("mode", mode)]
    b.func("vfs_read", b.int_("ssize_t", 8), [*vfs_read, ("c", schar)])
    b.func("__traceiter_opened", int_, [("__data", void_ptr), ("file", file_ptr), ("flags", uint)])
    b.func("void_fn", 0, [])
    b.func("many", char_ptr, [(f"p{n}", ulong) for n in range(1, 9)])
    b.func("wordy", int_, [("a" * 60, int_), ("b" * 67, int_)])
    return b


def types(of: BtfBuilder | None = None) -> BtfTypes:
    """Return built types, those of ``builder`` by default."""
    return BtfTypes(Btf(btf_index.parse((of or builder()).build())))


KERNEL = make_kernel(SYMBOLS, types=types())
UNTYPED = make_kernel(SYMBOLS)


def resolved(text: str, *, is_typed: bool = True, ibt: bool = False) -> Resolved:
    """Resolve a definition; every function's site is at its beginning, or after an endbr64."""
    kernel = KERNEL if is_typed else UNTYPED
    shift = 4 if ibt else 0
    return resolve(
        read(text), kernel, X86_64, event_id=1, locate=lambda function: Addr(function.addr + shift)
    )
