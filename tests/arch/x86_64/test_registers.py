"""Registers as the kernel prints them."""

from kprobes.arch.x86_64.registers import NAMES, show


def test_registers_look_as_in_the_kernels_log() -> None:
    values = {name: 0x1111_1111_1111_1111 * n for n, name in enumerate(NAMES[:15])}
    others = {"orig_ax": (1 << 64) - 1, "ip": 5, "cs": 0x10, "flags": 0x246, "sp": 7, "ss": 0x18}

    assert show(values | others, "vfs_read+0x0/0x310") == (
        "RIP: 0010:vfs_read+0x0/0x310\n"
        "RSP: 0018:0000000000000007 EFLAGS: 00000246 ORIG_RAX: ffffffffffffffff\n"
        "RAX: aaaaaaaaaaaaaaaa RBX: 5555555555555555 RCX: bbbbbbbbbbbbbbbb\n"
        "RDX: cccccccccccccccc RSI: dddddddddddddddd RDI: eeeeeeeeeeeeeeee\n"
        "RBP: 4444444444444444 R08: 9999999999999999 R09: 8888888888888888\n"
        "R10: 7777777777777777 R11: 6666666666666666 R12: 3333333333333333\n"
        "R13: 2222222222222222 R14: 1111111111111111 R15: 0000000000000000"
    )
