"""The memory that a linker fills: taken, let go of, and free again when nobody is inside.

Code that no site leads to any more stays where it is until then: a task may sleep in it, or return
to it.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager

from msgspec import Struct, field

from kprobes.errors import NoRoomError, UsageError
from kprobes.guest.arena import Arena
from kprobes.guest.guest import Code
from kprobes.model.plan import InstanceTable
from kprobes.model.upcall import MAX_UPCALLS
from kprobes.ports import Text
from kprobes.units import U64, Addr

_ALIGN = 16


def aligned(addr: int) -> Addr:
    """Return the first address from this one on where code may begin."""
    return Addr(-(-addr // _ALIGN) * _ALIGN)


def joined(codes: Sequence[Code]) -> list[Code]:
    """Return pieces of code as few that are written at once: what lies between is nobody's.

    Args:
        codes: with their addresses, by which they are sorted.
    """
    found: list[tuple[Addr, bytearray]] = []
    for addr, code in codes:
        if not found or addr != aligned(found[-1][0] + len(found[-1][1])):
            found.append((addr, bytearray()))
        start, blob = found[-1]
        blob += bytes(addr - start - len(blob)) + code
    return [(start, bytes(blob)) for start, blob in found]


class Room:
    """Free parts of some memory; the first that is large enough is taken."""

    def __init__(self) -> None:
        """Have nothing free yet."""
        self._free: list[Text] = []

    @property
    def size(self) -> int:
        """Bytes that are free."""
        return sum(stop - start for start, stop in self._free)

    def has(self, start: Addr, size: int) -> bool:
        """Whether these bytes are free; of none it is so."""
        index = bisect_right(self._free, (start, U64)) - 1
        return not size or (index >= 0 and start + size <= self._free[index][1])

    def find(self, size: int) -> Addr | None:
        """Return where so many bytes are free, or None; they stay free."""
        return next((start for start, stop in self._free if stop - start >= size), None)

    def take(self, start: Addr, size: int) -> None:
        """Take bytes that are free; they are counted in whole steps of the alignment."""
        stop = aligned(start + size)
        index = bisect_right(self._free, (start, U64)) - 1
        first, end = self._free[index]
        left = [(first, start), (stop, end)]
        self._free[index : index + 1] = [part for part in left if part[0] < part[1]]

    def give(self, start: Addr, size: int) -> None:
        """Give bytes back that were taken."""
        stop = aligned(start + size)
        index = bisect_right(self._free, (start, U64))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


class Area(Struct, kw_only=True):
    """What is where in one piece of code memory. Nothing is written yet.

    Attributes:
        text: [start, stop) that may be filled.
        room: what of it is free.
        entry_stub: where hits of sites near this go that wait for Python; None before there are
            any.
        called: where code here calls the guest's own functions, by what it calls them; empty before
            there is any.
        routines: code besides that of plans, by address: to be written before it is called.
        own: the sizes, by address, of what stays as long as the area: its stub, and ways to the
            guest's functions.
    """

    text: Text
    room: Room = field(default_factory=Room)
    entry_stub: Addr | None = None
    called: dict[str, Addr] = field(default_factory=dict[str, Addr])
    routines: list[tuple[Addr, bytes]] = field(default_factory=list[tuple[Addr, bytes]])
    own: dict[Addr, int] = field(default_factory=dict[Addr, int])

    def __post_init__(self) -> None:
        """Begin with all of it free."""
        self.room.give(self.text[0], self.text[1] - self.text[0])

    def fill(self, most: int, make: Callable[[Addr], bytes]) -> tuple[Addr, bytes]:
        """Make code for a place, take the bytes that it needs, and return both.

        Args:
            most: bytes that it has at most; so many must be free.
            make: returns the code for a place.

        Raises:
            NoRoomError: no room is left.
        """
        place = self.room.find(aligned(most))
        if place is None:
            raise NoRoomError("no room is left for the probes' code; probe fewer functions")
        code = make(place)
        self.room.take(place, len(code))
        return place, code

    @property
    def is_unused(self) -> bool:
        """Whether nothing is there but what is its own."""
        own = sum(aligned(size) for size in self.own.values())
        return self.room.size + own == self.text[1] - self.text[0]

    def forget(self, addrs: Collection[Addr]) -> None:
        """Have no code of its own at some addresses any more."""
        self.routines = [each for each in self.routines if each[0] not in addrs]
        if self.entry_stub in addrs:
            self.entry_stub = None
        if any(addr in addrs for addr in self.called.values()):
            self.called = {}
        self.own = {addr: size for addr, size in self.own.items() if addr not in addrs}

    def away(self, addr: Addr) -> int:
        """Return how far a branch must go at most between here and an address, in bytes."""
        return max(abs(end - addr) for end in self.text)


def _instances_of(arena: Arena) -> tuple[Addr, int]:
    # Whole steps of the alignment.
    start, stop = aligned(arena.instances), arena.instances + arena.instances_size
    return start, max(stop - start, 0) // _ALIGN * _ALIGN


NOWHERE: Text = Addr(0), Addr(0)


class Retired(Struct, frozen=True, kw_only=True):
    """What no site leads to any more.

    Attributes:
        text: where its code is, or NOWHERE.
        numbers: by which it asks Python.
        instances: of the calls that return to it, or None.
    """

    text: Text = NOWHERE
    numbers: tuple[int, ...] = ()
    instances: InstanceTable | None = None


class Pool:
    """Code memory, room for instances, and numbers of upcalls.

    Attributes:
        areas: of code; trampolines are in the first one, however far away a function is.
        near: those of them that are near the kernel's text.
        retired: what was let go of and is not free yet.
    """

    def __init__(self, arena: Arena) -> None:
        """Begin with the memory of an arena."""
        self.areas: list[Area] = []
        self.near: list[Text] = []
        self._grown: list[Arena] = []
        self.retired: list[Retired] = []
        self._instances = Room()
        self._numbers = list(range(MAX_UPCALLS - 1, -1, -1))
        self._taken: list[tuple[Room, Addr, int]] = []
        self.grow(arena)

    def grow(self, arena: Arena) -> None:
        """Have the code memory of an arena, and its room for instances, too."""
        near, *far = arena.programs
        self.near.append(near)
        self._grown.append(arena)
        self.areas[:0] = [Area(text=text) for text in (near, *far)]
        start, size = _instances_of(arena)
        if size:
            self._instances.give(start, size)

    @property
    def room(self) -> int:
        """Bytes that are free for code near the kernel's text."""
        return sum(area.room.size for area in self.areas if area.text in self.near)

    def unused(self) -> list[Arena]:
        """Return the memory, but for the first and the last that was taken, that nothing is in."""
        return [
            arena
            for arena in self._grown[1:-1]
            if all(area.is_unused for area in self.areas if area.text in arena.programs)
            and self._instances.has(*_instances_of(arena))
        ]

    def drop(self, arena: Arena) -> None:
        """Use some memory no more, in which nothing is."""
        self._grown.remove(arena)
        self.near.remove(arena.programs[0])
        self.areas = [area for area in self.areas if area.text not in arena.programs]
        start, size = _instances_of(arena)
        if size:
            self._instances.take(start, size)

    @contextmanager
    def all_or_nothing(self) -> Generator[None]:
        """Give back what is taken inside if that fails."""
        self._taken, numbers = [], list(self._numbers)
        try:
            yield
        except BaseException:
            self._numbers = numbers
            gone = {addr for _, addr, _ in self._taken}
            for area in self.areas:
                area.forget(gone)
            for room, addr, size in self._taken:
                room.give(addr, size)
            raise
        finally:
            self._taken = []

    def take_code(self, area: Area, most: int, make: Callable[[Addr], bytes]) -> tuple[Addr, bytes]:
        """Take room for code in an area; see ``Area.fill``."""
        place, code = area.fill(most, make)
        self._taken.append((area.room, place, len(code)))
        return place, code

    def take_routine(
        self, area: Area, most: int, make: Callable[[Addr], bytes], *, is_own: bool = False
    ) -> Text:
        """Have code in an area that is not a plan's, and return where; errors as for ``Area.fill``.

        Args:
            area: where it is.
            most: bytes that it has at most.
            make: returns the code for a place.
            is_own: whether it stays as long as the area.
        """
        place, code = self.take_code(area, most, make)
        area.routines.append((place, code))
        if is_own:
            area.own[place] = len(code)
        return place, Addr(place + len(code))

    def take_instances(self, size: int) -> Addr:
        """Return where so many bytes of instances may be, all zero.

        Raises:
            NoRoomError: no room is left.
        """
        addr = self._instances.find(size)
        if addr is None:
            raise NoRoomError("no room is left for calls in progress; probe fewer functions")
        self._instances.take(addr, size)
        self._taken.append((self._instances, addr, size))
        return addr

    def take_number(self) -> int:
        """Return a number that nobody asks Python by.

        Raises:
            UsageError: there is none.
        """
        if not self._numbers:
            raise UsageError(f"Python handlers at too many places: at most {MAX_UPCALLS}")
        return self._numbers.pop()

    def give_code(self, text: Text) -> None:
        """Have code memory free that nobody is inside."""
        if text != NOWHERE:
            room = next(a.room for a in self.areas if a.text[0] <= text[0] < a.text[1])
            room.give(text[0], text[1] - text[0])

    def free_retired(
        self,
        are_inside: Sequence[bool],
        in_use: Collection[InstanceTable],
        live: Collection[InstanceTable],
    ) -> list[InstanceTable]:
        """Have what was let go of free again where nobody is inside.

        Args:
            are_inside: for each of ``retired``, whether somebody is.
            in_use: tables with calls that return to their trampolines.
            live: tables of what is not let go of.

        Returns:
            Tables whose memory is free: it must be zero before it is taken again.
        """
        busy = [
            is_inside or each.instances in in_use
            for each, is_inside in zip(self.retired, are_inside, strict=True)
        ]
        gone = [each for each, is_busy in zip(self.retired, busy, strict=True) if not is_busy]
        self.retired = [each for each, is_busy in zip(self.retired, busy, strict=True) if is_busy]
        for each in gone:
            self._numbers += each.numbers
            self.give_code(each.text)
        left = (*live, *(each.instances for each in self.retired))
        used = {each.addr for each in left if each is not None}
        tables = {t.addr: t for t in (each.instances for each in gone) if t is not None}
        free = [table for addr, table in tables.items() if addr not in used]
        for table in free:
            self._instances.give(table.addr, table.size)
        return free
