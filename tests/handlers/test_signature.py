"""Handlers with a function's signature: which are taken, and what they are called with."""

from collections.abc import Callable
from typing import Any

import pytest

from kprobes.errors import UsageError
from kprobes.handlers.arguments import find_prototype
from kprobes.handlers.probe import Instance, Kprobe, Kretprobe
from kprobes.handlers.registers import Hit, Registers
from kprobes.handlers.signature import with_return_signature, with_signature
from tests.build import typed
from tests.build.handled import FILE, make_handled, make_place

NAMES = ("file", "buf", "count", "mode", "c")
PROTOTYPE = find_prototype(typed.types(), "vfs_read")
SPELLED = (
    "ssize_t vfs_read(struct file *file, char *buf, unsigned long count, enum mode mode, "
    "signed char c)"
)


def returned(handler: Callable[..., object]) -> bool:
    """Call a handler as a call of vfs_read that returns 5 does; return whether it keeps any."""
    made, place = make_handled(), make_place()
    return_handler, entry_handler = with_return_signature(handler, PROTOTYPE, NAMES)
    probe = Kretprobe(symbol_name="vfs_read", handler=return_handler, entry_handler=entry_handler)
    instance, entry = Instance(probe, 0), made.vcpu(di=FILE, dx=3)
    hit = Hit(
        live=made.live,
        vcpu=entry,
        module="",
        constants={},
        arguments=lambda: place.arguments(made.live),
        returning=lambda: PROTOTYPE,
    )
    if entry_handler is not None:
        entry_handler(instance, Registers(hit, ip=1))
    entry.registers |= {"di": 0, "dx": 0, "ax": 5}
    return_handler(instance, Registers(hit, ip=2))
    return entry_handler is not None


def called(handler: Callable[..., object]) -> None:
    """Call a handler as a hit of vfs_read does."""
    pre_handler = with_signature(handler, PROTOTYPE, NAMES)
    made, place = make_handled(), make_place()
    hit = Hit(
        live=made.live,
        vcpu=made.vcpu(di=FILE, dx=3),
        module="",
        constants={},
        arguments=lambda: place.arguments(made.live),
    )
    pre_handler(Kprobe(symbol_name="vfs_read", pre_handler=pre_handler), Registers(hit, ip=1))


def test_arguments_come_by_their_names_in_any_order() -> None:
    seen: list[tuple[int, int]] = []

    def handler(count: int, file: Any) -> None:
        seen.append((count, file.f_mode))

    called(handler)

    assert seen == [(3, 0x1D)]


def test_all_come_by_position_when_no_name_is_one_of_them() -> None:
    seen: list[tuple[int, int]] = []

    def handler(a: Any, b: Any, n: int, d: int, e: int) -> None:
        seen.append((a.f_mode, n))

    called(handler)

    assert seen == [(0x1D, 3)]


def test_the_rest_is_taken_with_stars() -> None:
    seen: list[tuple[int, list[str]]] = []

    def by_position(*args: Any) -> None:
        seen.append((args[2], []))

    def by_name(count: int, **others: Any) -> None:
        seen.append((count, [*others]))

    called(by_position)
    called(by_name)

    assert seen == [(3, []), (3, ["file", "buf", "mode", "c"])]


def test_registers_and_probe_come_by_keyword() -> None:
    seen: list[tuple[int, str]] = []

    def handler(*, regs: Registers, probe: Kprobe) -> None:
        seen.append((regs.dx, probe.place))

    called(handler)

    assert seen == [(3, "vfs_read")]


def test_parameters_with_defaults_may_be_others() -> None:
    seen: list[tuple[int, int]] = []

    def handler(count: int, limit: int = 7) -> None:
        seen.append((count, limit))

    called(handler)

    assert seen == [(3, 7)]


def _typo(file: Any, cuont: int) -> None: ...
def _few(a: Any, b: Any) -> None: ...
def _keyword(*, count: int, task: Any) -> None: ...
def _only(count: int, /) -> None: ...


@pytest.mark.parametrize(
    ("handler", "what"),
    [
        (_typo, "_typo takes cuont, which vfs_read has not"),
        (_few, "_few takes a, b, which vfs_read has not"),
        (_keyword, "_keyword takes task, which vfs_read has not"),
        (_only, "_only cannot be called"),
    ],
)
def test_others_are_refused_with_the_true_prototype(
    handler: Callable[..., object], what: str
) -> None:
    with pytest.raises(UsageError) as caught:
        with_signature(handler, PROTOTYPE, NAMES)

    assert str(caught.value).startswith(what)
    assert str(caught.value).endswith(SPELLED)


def test_what_is_returned_comes_alone() -> None:
    seen: list[int] = []

    def handler(retval: int) -> None:
        seen.append(retval)

    assert not returned(handler)

    assert seen == [5]


def test_what_is_returned_comes_with_the_arguments_of_the_entry() -> None:
    seen: list[tuple[int, int, int, int, str]] = []

    def handler(count: int, retval: int, file: Any, *, regs: Registers, probe: Kretprobe) -> None:
        seen.append((retval, count, file.f_mode, regs.dx, probe.place))

    assert returned(handler)

    assert seen == [(5, 3, 0x1D, 0, "vfs_read")]


def test_the_arguments_come_by_position_after_what_is_returned() -> None:
    seen: list[tuple[int, int]] = []

    def handler(*values: Any) -> None:
        seen.append((values[0], values[3]))

    assert returned(handler)

    assert seen == [(5, 3)]


def test_a_wrong_name_at_a_return_is_refused_with_the_true_prototype() -> None:
    def handler(retval: int, cuont: int) -> None: ...

    with pytest.raises(UsageError, match="handler takes cuont, which vfs_read has not: ssize_t"):
        with_return_signature(handler, PROTOTYPE, NAMES)
