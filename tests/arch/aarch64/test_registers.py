"""Names of registers, and how the kernel prints them."""

from kprobes.arch.aarch64.registers import ALIASES, ARGUMENTS, NAMES, QUERIED, STUB_NAMES, show

# As a Debian 6.1 guest printed it, the lines before and after left out.
SHOWN = """\
pstate: 60000005 (nZCv daif -PAN -UAO -TCO -DIT -SSBS BTYPE=--)
pc : vfs_read+0x0/0x2a0
lr : 0xffff800008332d14
sp : ffff80000a7cbd50
x29: ffff80000a7cbd50 x28: 000000000000001c x27: 000000000000001b"""


def values(**changed: int) -> dict[str, int]:
    return {name: n for n, name in enumerate(NAMES)} | changed


def test_the_order_is_that_of_pt_regs() -> None:
    assert NAMES[:2] == ("x0", "x1")
    assert [8 * NAMES.index(name) for name in ("x30", "sp", "pc", "pstate")] == [240, 248, 256, 264]


def test_every_name_of_the_kernel_s_can_be_asked_for() -> None:
    assert set(QUERIED) == {*NAMES, "lr"}
    assert ALIASES["lr"] == "x30"
    assert tuple(f"x{n}" for n in range(8)) == ARGUMENTS
    assert STUB_NAMES["pstate"] == "cpsr"


def test_registers_are_shown_as_the_kernel_shows_them() -> None:
    found = show(
        values(
            pstate=0x6000_0005,
            x30=0xFFFF_8000_0833_2D14,
            sp=0xFFFF_8000_0A7C_BD50,
            x29=0xFFFF_8000_0A7C_BD50,
        ),
        "vfs_read+0x0/0x2a0",
    )

    lines = found.splitlines()
    assert "\n".join(lines[:5]) == SHOWN
    assert lines[-1] == "x2 : 0000000000000002 x1 : 0000000000000001 x0 : 0000000000000000"
    assert len(lines) == 14


def test_flags_that_are_set_are_capital_letters() -> None:
    assert "(NzcV DAIF +PAN -UAO +TCO -DIT +SSBS BTYPE=-c)" in show(values(pstate=0x9240_1BC5), "f")
