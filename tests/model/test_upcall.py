"""A question: what its upcalls are shown, who is left out, and where the vCPU goes on."""

from collections.abc import Callable

from kprobes.model.upcall import Upcall, UpcallGroup, WaitingVcpu
from kprobes.units import Addr

SITE, NEXT, ELSEWHERE = Addr(0x1000), Addr(0x1003), Addr(0x5000)
COPY, NEXT_COPY = Addr(0x9000), Addr(0x9010)
COPIES = {SITE: COPY, NEXT: NEXT_COPY}


def _waiting(ip: int) -> WaitingVcpu:
    registers = {"ip": ip, "sp": 0x8000, "ax": 0}
    return WaitingVcpu(upcall=1, cpu=0, task=Addr(0), page_table=0, registers=registers)


def _question(*serves: Callable[[WaitingVcpu], None], is_after: bool = False) -> UpcallGroup:
    upcalls = [
        Upcall(number=n, addr=SITE, is_after=is_after, serve=serve)
        for n, serve in enumerate(serves, 1)
    ]
    return UpcallGroup(number=1, upcalls=tuple(upcalls), copies=COPIES)


def test_a_handler_is_shown_the_true_address_and_the_cpu_goes_on_in_the_copy() -> None:
    shown: list[int] = []
    waiting = _waiting(COPY)

    _question(lambda w: shown.append(w.registers["ip"])).serve(waiting)

    assert shown == [SITE]
    assert waiting.registers["ip"] == COPY


def test_an_address_that_the_patch_covers_is_gone_to_in_its_copy() -> None:
    waiting = _waiting(COPY)

    _question(lambda w: w.registers.update(ip=NEXT)).serve(waiting)

    assert waiting.registers["ip"] == NEXT_COPY


def test_any_other_address_is_gone_to_itself() -> None:
    waiting = _waiting(COPY)

    _question(lambda w: w.registers.update(ip=ELSEWHERE)).serve(waiting)

    assert waiting.registers["ip"] == ELSEWHERE


def test_several_are_served_in_order_and_see_what_the_ones_before_changed() -> None:
    seen: list[tuple[int, int]] = []

    def serve(waiting: WaitingVcpu) -> None:
        seen.append((waiting.upcall, waiting.registers["ax"]))
        waiting.registers["ax"] += 5

    _question(serve, serve, serve).serve(_waiting(COPY))

    assert seen == [(1, 0), (2, 5), (3, 10)]


def test_who_goes_elsewhere_before_the_instruction_is_the_last() -> None:
    seen: list[int] = []

    def leave(waiting: WaitingVcpu) -> None:
        waiting.registers["ip"] = ELSEWHERE

    _question(leave, lambda w: seen.append(w.upcall)).serve(_waiting(COPY))

    assert seen == []


def test_after_the_instruction_all_are_served_wherever_it_goes() -> None:
    seen: list[int] = []

    def leave(waiting: WaitingVcpu) -> None:
        waiting.registers["ip"] = ELSEWHERE

    waiting = _waiting(NEXT)
    _question(leave, lambda w: seen.append(w.registers["ip"]), is_after=True).serve(waiting)

    assert seen == [ELSEWHERE]
    assert waiting.registers["ip"] == ELSEWHERE
