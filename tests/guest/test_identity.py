"""Match of a stopped guest and a journal: reboots and restored states, told apart."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import Struct, field

from kprobes.errors import GuestReplacedError
from kprobes.formats.target_xml import Description
from kprobes.guest import identity
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.identity import IdentityCheck, check_stopped
from kprobes.guest.journal import Boot
from kprobes.transport.stub import Stub
from kprobes.units import Addr, Phys
from tests.build.guest import DATA, make_memory
from tests.build.kernel import make_kernel, symbol
from tests.build.pages import FakeRam, Pages

CANARY = Addr(0xFFFF_FFFF_8200_0000)
PHYS = Phys(0x5000)
PLACE = Phys(0x9000)
ROOT = 0x10_0000
BOOT = Boot(addr=CANARY, phys=PHYS, value=b"canary.1")
MARK = b"sixteen bytes..."
KERNEL, NOWHERE = {"cr3": ROOT}, {"cr3": 0}


class Vcpu(Struct):
    """A stub of one vCPU; its registers at each look, the last ones from then on."""

    looks: list[Mapping[str, int]] = field(default_factory=lambda: [KERNEL])
    description: Description = Description(architecture="i386:x86-64", slots=())

    def ids(self) -> list[int]:
        return [1]

    def registers(self, cpu: int) -> Mapping[str, int]:
        assert cpu == 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


class Journal(Struct, frozen=True):
    boot: Boot = BOOT
    mark: bytes = MARK
    mark_place: Phys | None = PLACE
    state: int = 3


@pytest.fixture
def ram() -> FakeRam:
    ram = FakeRam(2 << 20)
    Pages(ram, ROOT).map(CANARY, PHYS)
    ram.write(PHYS, b"canary.1")
    ram.write(PLACE, MARK + (3).to_bytes(8, "little"))
    return ram


def check(ram: FakeRam, *looks: Mapping[str, int]) -> None:
    check_stopped(Journal(), cast("Stub", Vcpu([*looks])), ram)


@pytest.mark.parametrize("state", [2, 3])
def test_the_same_guest_may_be_one_change_after_its_journal(ram: FakeRam, state: int) -> None:
    ram.write(PLACE + 16, state.to_bytes(8, "little"))

    check(ram, KERNEL)


def test_another_boot_of_the_same_kernel_is_a_reboot(ram: FakeRam) -> None:
    ram.write(PHYS, b"canary.2")

    with pytest.raises(GuestReplacedError, match="the guest was rebooted"):
        check(ram, KERNEL)


def test_memory_alone_tells_another_boot_of_a_running_guest(ram: FakeRam) -> None:
    ram.write(PHYS, b"canary.2")

    with pytest.raises(GuestReplacedError, match="the guest was rebooted"):
        identity.check(Journal(), ram.read)


@pytest.mark.parametrize("is_mark_left", [True, False])
def test_a_reset_is_a_reboot_whatever_it_overwrites_first(ram: FakeRam, is_mark_left: bool) -> None:
    if not is_mark_left:
        ram.write(PLACE, bytes(16))

    with pytest.raises(GuestReplacedError, match="the guest was rebooted"):
        check(ram, NOWHERE)


def test_memory_that_is_not_ours_in_the_same_boot_was_restored(ram: FakeRam) -> None:
    ram.write(PLACE, bytes(16))

    with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
        check(ram, KERNEL)


def test_an_earlier_state_of_ours_has_probes(ram: FakeRam) -> None:
    ram.write(PLACE + 16, (1).to_bytes(8, "little"))

    with pytest.raises(GuestReplacedError, match="in which it has probes of ours"):
        check(ram, KERNEL)


def test_a_state_that_is_restored_between_two_looks_is_no_reboot(ram: FakeRam) -> None:
    ram.write(PLACE, bytes(16))

    with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
        check(ram, NOWHERE, KERNEL)


def _watched(*, knows_time: bool = True) -> tuple[IdentityCheck, GuestMemory]:
    memory = make_memory()
    symbols = [symbol("jiffies_64", DATA, type="D", size=8)] if knows_time else []
    memory.ram.write(0, b"canary.1")
    boot = Boot(addr=CANARY, phys=Phys(0), value=b"canary.1")
    guest = cast("Guest", SimpleNamespace(memory=memory, kernel=make_kernel(symbols)))
    memory.set_u64(DATA, 1_000)
    return IdentityCheck(Journal(boot=boot, mark_place=None), guest), memory


def test_time_that_goes_back_is_an_earlier_state_before_there_is_a_mark() -> None:
    watch, memory = _watched()
    memory.set_u64(DATA, 1_001)
    watch.check()
    watch.check()
    memory.set_u64(DATA, 1_000)

    with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
        watch.check()
    # As where the counter that it is made of does not go back.
    memory.set_u64(DATA, 9_000)
    with pytest.raises(GuestReplacedError, match="restored to an earlier state"):
        watch.check()


def test_a_kernel_that_hides_its_time_is_not_taken_for_another() -> None:
    watch, memory = _watched(knows_time=False)
    memory.set_u64(DATA, 0)

    watch.check()
