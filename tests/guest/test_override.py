"""Which functions may be skipped, what they may return, and what is kept of an override."""

import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from kprobes.errors import DefinitionError, KprobesError, RefusedError, TargetError, UsageError
from kprobes.formats.btf_index import Kind
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.override import (
    Injectable,
    OverrideResolver,
    Overrides,
    read_counts,
    read_injectable,
)
from kprobes.guest.places import places_of
from kprobes.image.types import parse_types
from kprobes.model.filter import Compare, Header
from kprobes.model.override import (
    ALWAYS,
    MAX_OVERRIDES,
    OVERRIDE_SIZE,
    ErrorType,
    Override,
    OverrideCounts,
    OverrideOptions,
)
from kprobes.model.resolved import RegisterValue
from kprobes.units import U64, Addr
from tests.build.btf import BtfBuilder
from tests.build.guest import make_arena, make_guest, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.pages import FakeRam

CPUS, LIST, ENTRIES = TEXT + 0x8000, TEXT + 0x8100, TEXT + 0x8200
START, STEP = TEXT + 0x1000, 0x20
SYSTEM_CALL = "__x64_sys_getpid"
NAMES = ("fails", "gives", "either", "is_bad", "other", "stores", SYSTEM_CALL)
LISTED = {"fails": 1, "gives": 0, "either": 2, "is_bad": 3}
SIGNED = 1 << 24


def make_types(first: int = 0) -> BtfBuilder:
    """Types as of 6.2 on; before, EI_ETYPE_NONE was the first."""
    b = BtfBuilder()
    int_ = b.add(Kind.INT, "int", 4, words=[32 | SIGNED])
    pointer, unsigned = b.ptr(0), b.int_("unsigned int", 4)
    bool_ = b.int_("_Bool", 1)
    b.enum("", {f"EI_ETYPE_{each}": n for n, each in enumerate(ErrorType, first)})
    b.func("fails", int_, [("count", unsigned), ("pid", int_), ("odd", b.struct("pair", 16, []))])
    b.func("gives", pointer, [])
    b.func("either", pointer, [])
    b.func("is_bad", bool_, [])
    b.func("other", unsigned, [])
    b.func("stores", 0, [])
    b.func(SYSTEM_CALL, b.add(Kind.INT, "long", 8, words=[64 | SIGNED]), [])
    return b


def fill_list(
    memory: FakeRam | GuestMemory, entries: Sequence[tuple[int, int, int]], last: int = LIST
) -> None:
    """Write a ring of (start, stop, error type); the last link may lead elsewhere."""
    places = [ENTRIES + STEP * 2 * n for n in range(len(entries))]
    for here, there in zip([LIST, *places], [*places, last], strict=True):
        memory.write(here, struct.pack("<Q", there))
    for place, entry in zip(places, entries, strict=True):
        memory.write(place + 16, struct.pack("<QQi", *entry))


def make_listing(*, is_listed: bool = True, first: int = 0) -> Guest:
    """Return a guest with functions, of which some are listed."""
    made = make_guest(["p f"] * len(NAMES))
    memory = made.guest.memory
    memory.write(CPUS, (2).to_bytes(4, "little"))
    addrs: dict[str, Addr] = dict(zip(NAMES, made.sites, strict=True))
    fill_list(memory, [(addrs[n], addrs[n] + STEP, first + kind) for n, kind in LISTED.items()])
    symbols = [
        *(symbol(name, addr, size=STEP) for name, addr in addrs.items()),
        symbol("nr_cpu_ids", CPUS, type="D"),
        symbol("__per_cpu_offset", CPUS + 64, type="D"),
        *made.guest.kernel.symbols.all_named("ftrace_pages_start"),
        *([symbol("error_injection_list", LIST, type="d")] if is_listed else []),
    ]
    kernel = make_kernel(symbols, types=parse_types(make_types(first).build()))
    return replace(made.guest, kernel=kernel)


def make_override(
    place: str, value: int, guest: Guest | None = None, **options: object
) -> Override:
    guest = guest or make_listing()
    chosen = replace(OverrideOptions(), **options)  # pyright: ignore[reportArgumentType] - as named
    return OverrideResolver(guest, places_of(guest)).resolve(place, value, chosen, number=3)


@pytest.mark.parametrize("first", [0, 1])
def test_the_kernel_s_list_is_read_with_its_own_numbers(first: int) -> None:
    guest = make_listing(first=first)

    found = read_injectable(guest.memory, guest.kernel)

    assert found is not None
    assert [(n.start, n.stop) for n in found] == [
        (START + STEP * n, START + STEP * (n + 1)) for n in range(4)
    ]
    assert [n.error_type for n in found] == ["ERRNO", "NULL", "ERRNO_NULL", "TRUE"]


@pytest.mark.parametrize(("release", "first"), [("6.1.0", 1), ("6.2.0", 0), ("7.0.0", 0)])
def test_without_types_the_release_tells_the_numbers(release: str, first: int) -> None:
    memory = FakeRam(0x9000, start=TEXT)
    fill_list(memory, [(START, START + 1, first), (START, START + 1, first + 3)])
    kernel = replace(make_kernel([symbol("error_injection_list", LIST)]), release=release)

    assert read_injectable(memory, kernel) == [
        Injectable(start=Addr(START), stop=Addr(START + 1), error_type=error_type)
        for error_type in (ErrorType.NULL, ErrorType.TRUE)
    ]


@pytest.mark.parametrize("last", [0, ENTRIES, TEXT + 0x8FF0, 1 << 63])
def test_a_list_that_does_not_end_well_ends(last: int) -> None:
    memory = FakeRam(0x9000, start=TEXT)
    fill_list(memory, [(START, START + 1, 0), (START, START + 1, 99)], last)
    kernel = make_kernel([symbol("error_injection_list", LIST)])
    kernel = replace(kernel, release="6.2.0")

    found = read_injectable(memory, kernel)

    assert found is not None
    assert len(found) == 1


def test_the_list_says_what_is_returned() -> None:
    wrong: list[tuple[str, int]] = []
    for place in LISTED:
        for value in (-4096, -4095, -12, -1, 0, 1, 2, 42):
            try:
                override = make_override(place, value)
            except RefusedError:
                wrong.append((place, value))
            else:
                assert (override.value, override.number) == (value & U64, 3)

    errnos = (-4095, -12, -1)
    allowed = {"fails": errnos, "gives": (0,), "either": (*errnos, 0), "is_bad": (1,)}
    assert wrong == [
        (place, value)
        for place in LISTED
        for value in (-4096, -4095, -12, -1, 0, 1, 2, 42)
        if value not in allowed[place]
    ]


def test_a_value_s_type_is_checked_even_by_force() -> None:
    assert make_override("fails", 42, force=True).value == 42
    assert make_override("is_bad", 0, force=True).value == 0
    assert make_override("other", 0xFFFF_FFFF, force=True).value == 0xFFFF_FFFF
    assert make_override("stores", 0, force=True).value == 0
    for place, value in [("fails", 1 << 31), ("is_bad", 2), ("other", -1), ("stores", 1)]:
        with pytest.raises(RefusedError, match=r"void|is not from"):
            make_override(place, value, force=True)


def test_what_is_not_listed_needs_force_and_the_reason_is_told() -> None:
    with pytest.raises(RefusedError, match=r"not on the kernel's list .*force=True"):
        make_override("other", 1)
    with pytest.raises(RefusedError, match="CONFIG_FUNCTION_ERROR_INJECTION=y has"):
        make_override("fails", -12, make_listing(is_listed=False))
    with pytest.raises(RefusedError, match=r"callers expect a negative errno .* \(ERRNO\)"):
        make_override("fails", 42)


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_system_call_may_return_anything_to_its_user(is_listed: bool) -> None:
    # Kernels with a list have all of them in it.
    guest = make_listing(is_listed=is_listed)

    assert make_override(SYSTEM_CALL, -12, guest).value == -12 & U64
    assert make_override(SYSTEM_CALL, 42, guest).value == 42


def test_a_filter_names_parameters_variables_and_the_task() -> None:
    filter_text = 'count == 3 && $arg2 < 0 && pid == 5 && tgid == 6 && comm != "$arg1"'
    override = make_override("fails", -12, filter=filter_text)

    assert override.probe.filter is not None
    tests = [step.test for step in override.probe.filter.steps]
    sources = [test.source for test in tests if isinstance(test, Compare)]
    fields = [field.name for field in override.probe.layout.fields]
    operands = [fetch.operand for fetch in override.probe.fetches]
    # Its own parameter is called pid, and comes before the task's; what is in quotes is a text.
    assert fields == ["arg2", "count", "pid"]
    assert [fields[n] if isinstance(n, int) else n for n in sources] == [
        *("count", "arg2", "pid", Header.TGID),
    ]
    assert operands[:2] == [RegisterValue(name="si"), RegisterValue(name="di")]


def test_without_a_parameter_of_that_name_pid_is_the_task_s() -> None:
    override = make_override("either", -12, filter="pid == 5")

    assert override.probe.filter is not None
    (test,) = [step.test for step in override.probe.filter.steps]
    assert isinstance(test, Compare)
    assert test.source is Header.PID


@pytest.mark.parametrize("filter_text", ["nothing == 1", "common_type == 1", "count =="])
def test_a_wrong_filter_is_an_error_of_it(filter_text: str) -> None:
    with pytest.raises(DefinitionError):
        make_override("fails", -12, filter=filter_text)


def test_conditions_become_numbers() -> None:
    override = make_override("fails", -12, every=7, times=9, probability=0.25)

    assert (override.every, override.times, override.chance) == (7, 9, ALWAYS // 4)
    assert make_override("fails", -12, probability=1.0).chance == ALWAYS
    assert make_override("fails", -12).chance == ALWAYS


@pytest.mark.parametrize("place", ["", "fail*", "fails+4", "fails x=1", "%ax", "@f"])
def test_only_a_function_s_name_is_a_place(place: str) -> None:
    with pytest.raises(UsageError, match="not a function"):
        make_override(place, -12)


@pytest.mark.parametrize("place", ["failz", "nosuch:fails"])
def test_a_function_that_is_not_there_is_told_as_it_was_given(place: str) -> None:
    with pytest.raises(KprobesError) as caught:
        make_override(place, -12)

    assert "overrides/override" not in str(caught.value)
    if place == "failz":
        assert str(caught.value).splitlines()[1:3] == ["  Command: failz", " " * 11 + "^"]


def test_there_is_an_end_of_numbers() -> None:
    guest = make_listing()
    resolver = OverrideResolver(guest, places_of(guest))

    with pytest.raises(UsageError, match="too many"):
        resolver.resolve("fails", -12, OverrideOptions(), number=MAX_OVERRIDES)


def test_counts_are_read_by_number() -> None:
    memory, arena = make_memory(), make_arena()
    memory.write(arena.overrides + 5 * OVERRIDE_SIZE, struct.pack("<4Q", 9, 8, 7, 6))

    assert read_counts(memory, arena, 5) == OverrideCounts(hits=9, skipped=7, missed=6)
    assert read_counts(memory, arena, 4) == OverrideCounts()


class Session:
    """What arms overrides, for ``Overrides``: the counts, and whether arming fails."""

    def __init__(self) -> None:
        self.counts: dict[int, OverrideCounts] | None = {}
        self.is_failing = False
        self.takes_s = 0.0
        self.armings: list[list[int]] = []
        guest = make_listing()
        resolver = OverrideResolver(guest, places_of(guest))
        self.overrides = Overrides(
            find=lambda: resolver, read=self._read, arm=self._arm, lock=threading.RLock()
        )

    def _read(self, number: int) -> OverrideCounts | None:
        return None if self.counts is None else self.counts.get(number, OverrideCounts())

    def _arm(self, overrides: Sequence[Override]) -> None:
        self.armings.append([each.number for each in overrides])
        time.sleep(self.takes_s)
        if self.is_failing:
            self.is_failing = False
            raise TargetError("the guest changed a site")


def test_the_newest_is_asked_first_and_numbers_are_never_used_again() -> None:
    session = Session()
    first = session.overrides.add("fails", -12, OverrideOptions())
    session.overrides.add("fails", -5, OverrideOptions())
    first.delete()
    first.delete()
    session.overrides.add("fails", -1, OverrideOptions())

    assert session.armings == [[0], [1, 0], [1], [2, 1]]


def test_threads_that_add_at_once_share_no_number_and_lose_no_override() -> None:
    session = Session()
    session.takes_s = 0.01

    with ThreadPoolExecutor(4) as pool:
        for value in range(-8, 0):
            pool.submit(session.overrides.add, "fails", value, OverrideOptions())

    assert sorted(each.number for each in session.overrides.armed) == list(range(8))
    assert session.armings == [list(range(n, -1, -1)) for n in range(8)]


def test_what_cannot_be_armed_leaves_those_of_before() -> None:
    session = Session()
    session.overrides.add("fails", -12, OverrideOptions())
    session.is_failing = True

    with pytest.raises(TargetError, match="changed a site"):
        session.overrides.add("fails", -5, OverrideOptions())

    assert session.armings == [[0], [1, 0]]
    assert [each.number for each in session.overrides.armed] == [0]


def test_counts_stay_when_the_guest_is_let_go_of() -> None:
    session = Session()
    override = session.overrides.add("fails", -12, OverrideOptions())
    session.counts = {0: OverrideCounts(hits=5, skipped=2)}
    session.overrides.keep_counts()
    session.counts = None

    assert (override.hits, override.skipped) == (5, 2)
    assert repr(override) == "<override of fails: 2 of 5 calls skipped>"


def test_overrides_go_with_their_module_s_text() -> None:
    session = Session()
    session.overrides.add("fails", -12, OverrideOptions())
    session.overrides.add("gives", 0, OverrideOptions())

    session.overrides.forget([(Addr(START), Addr(START + STEP))])

    assert [each.number for each in session.overrides.armed] == [1]
