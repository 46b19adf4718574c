"""The undo journal: what was about to be written to a guest, in a file before it is written.

One file per session under ``$XDG_STATE_HOME/kprobes/journal``, of JSON lines: which target and
who, which kernel, what is allocated (``guest.allocations``), then a line per group of patches. Each
is written before its patches are made, so that every byte can be put back after the tracer was
killed. Of a guest that may outlive this machine it is on the disk by then, and all lines before it.
"""

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field
from msgspec.structs import asdict

from kprobes import directories
from kprobes.errors import FormatError, KprobesError, StateError
from kprobes.guest.allocations import AllocationLog, Kind
from kprobes.guest.armed import (
    ArmedPatch,
    ArmedProbe,
    armed,
    by_site,
    line_of,
    patches_line,
    probes_line,
)
from kprobes.guest.guest import InitText
from kprobes.units import Addr, Phys

_log = logging.getLogger(__name__)
_VERSION = 1
_MAX_SIZE = 256 << 20
_LONGEST_LINE = 1 << 16
_MARK = 16
_OF_PATCHES = (b'{"undos"', b'{"probes"', b'{"restored"')
"""How lines begin that are dropped with the patches."""
_BROKEN = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError),
    RecursionError,
)
"""What reading one raises that we did not write, or that was damaged since."""


class RamMap(Struct, frozen=True, kw_only=True):
    """How a guest's memory is looked at without its stub, which a tracer keeps for itself.

    Attributes:
        pid, started: of the guest's QEMU on this machine.
        runs: of RAM: guest-physical address, bytes, address in QEMU's memory.
        arch: of the guest.
        registers: that lead to its kernel's page table.
    """

    pid: int
    started: str
    runs: tuple[tuple[int, int, int], ...]
    arch: str
    registers: Mapping[str, int]


class Boot(Struct, frozen=True, kw_only=True):
    """Bytes of a guest's kernel that are random at each boot, and where they lie.

    Attributes:
        addr, phys: their kernel and their physical address.
        value: what they are.
    """

    addr: Addr
    phys: Phys
    value: bytes


class MarkPlace(Struct, frozen=True, kw_only=True):
    """Where a session's mark lies in a guest's memory.

    Attributes:
        allocation: the address of the memory that it is in.
        phys: its physical address.
    """

    allocation: Addr
    phys: Phys


class Entry(Struct, frozen=True, kw_only=True):
    """One session's journal as it lies on disk.

    Attributes:
        path: of the file.
        target: the stub's address.
        build_id, release: of the guest's kernel.
        pid, started: of the tracer: its number, and when it began.
        patches: in the order in which they were to be written.
        mark: what the tracer left in the first memory that it allocated: who finds it there
            looks at the guest as it was then, and not as it was booted anew.
        marked: where, or None.
        state: how often its patches changed; it stands after the mark.
        boot: of the guest, or None where that was not found out.
        init_text: of a guest that was booting, else None.
        guardian: its process and when that began; 0 and "" without one.
        is_held: whether the tracer knew that somebody else had paused the guest.
        is_closed: whether the tracer ended by itself, and not everything could be given back.
        image, symbols: files of the kernel, where the tracer was given them, else "".
        allocations: what is allocated in the guest.
        probes: that are armed; of one site in the order in which a hit runs them.
        window: how to look at the guest beside the tracer, or None where that cannot be.
    """

    path: Path
    target: str
    build_id: str
    release: str
    pid: int
    started: str
    patches: tuple[ArmedPatch, ...]
    mark: bytes = b""
    marked: MarkPlace | None = None
    state: int = 0
    boot: Boot | None = None
    init_text: InitText | None = None
    guardian: tuple[int, str] = (0, "")
    is_held: bool = False
    is_closed: bool = False
    image: str = ""
    symbols: str = ""
    allocations: AllocationLog = field(default_factory=AllocationLog)
    probes: tuple[ArmedProbe, ...] = ()
    window: RamMap | None = None

    @property
    def is_done(self) -> bool:
        """Whether the guest is as it was before."""
        return not self.patches and self.allocations.is_empty

    @property
    def has_only_memory(self) -> bool:
        """Whether its tracer ended by itself and nothing but memory is left to give back."""
        return self.is_closed and not self.patches and self.allocations.call is None

    @property
    def mark_place(self) -> Phys | None:
        """Where its mark must be in the guest, or None while it need not be anywhere."""
        return _mark_place(self.marked, self.allocations)

    @property
    def is_watched(self) -> bool:
        """Whether its guardian lives, who puts the guest right if nobody else does."""
        pid, began = self.guardian
        return bool(began) and process_start(pid) == began

    @property
    def is_abandoned(self) -> bool:
        """Whether the tracer that wrote it is gone; another process may have its number now."""
        began = process_start(self.pid)
        return not began or began != self.started


class Journal:
    """A session's journal while it is being written.

    Attributes:
        mark: random bytes that name this session in the guest's memory.
        state: how often the patches changed; it stands after the mark.
        noted: the state that the guest was told last. It is never more than one behind when another
            one begins: who finds the two tells by that a guest that was restored.
        boot: of the guest, or None before it is known.
        allocations: what is allocated in the guest; writes itself down here.
    """

    def __init__(self, path: Path, mark: bytes) -> None:
        self.path = path
        self.mark = mark
        self.state = self.noted = 0
        self.boot: Boot | None = None
        self.allocations = AllocationLog(self._note)
        self._marked: MarkPlace | None = None
        # The file and its head: whoever notices a pause writes here beside whoever arms.
        self._lock = threading.RLock()
        self._head = b""
        self._must_sync = True
        self._is_listed = False
        self._probes: dict[Addr, list[ArmedProbe]] = {}
        self._is_clear = True

    @classmethod
    def create(cls, target: str, *, mark: bytes | None = None) -> "Journal":
        """Begin a journal for one target, of a new session unless the mark of one is given.

        Raises:
            StateError: there is no place for it that is ours alone.
        """
        folder = directory()
        directories.make(folder, top=directories.state())
        pid = os.getpid()
        journal = cls(
            folder / f"{pid}-{secrets.token_hex(4)}.jsonl", mark or secrets.token_bytes(_MARK)
        )
        who = {"pid": pid, "started": process_start(pid), "mark": journal.mark.hex()}
        journal._head = line_of({"version": _VERSION, "target": target, **who})
        journal._replace(b"")
        return journal

    @classmethod
    def reopen(cls, entry: Entry) -> "Journal":
        """Go on with the journal of a dead tracer, its undos too until ``forget_undos``."""
        journal = cls(entry.path, entry.mark)
        journal.state = journal.noted = entry.state
        journal.boot, journal._marked = entry.boot, entry.marked
        journal._must_sync = entry.window is None
        lines = _raw_lines(entry.path)
        # Without the line that it died in.
        os.truncate(entry.path, sum(len(line) + 1 for line in lines))
        for line in lines:
            if not line.startswith(_OF_PATCHES):
                journal.allocations.replay(json.loads(line))
                journal._head += line + b"\n"
        journal._is_clear = not entry.patches
        return journal

    def forget_undos(self) -> None:
        """Forget the undos of a dead tracer: all are done.

        The state stays as it is: the guest has not heard of another, and may be one behind.
        """
        self._write_patches((), self.state)

    @property
    def is_clear(self) -> bool:
        """Whether nothing is left to put back."""
        return self._is_clear

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to put back or to free, or the journal was removed."""
        return (self._is_clear and self.allocations.is_empty) or not self.path.exists()

    @property
    def mark_place(self) -> Phys | None:
        """Where the mark must be in the guest, or None while it need not be anywhere."""
        return _mark_place(self._marked, self.allocations)

    def watch(self, check: Callable[[], None]) -> None:
        """Have a check made before the guest is written to, or made to call anything."""
        self.allocations.check = check

    def check(self) -> None:
        """Raise GuestReplacedError unless the guest is still the one that was attached to."""
        self.allocations.check()

    def note_boot(self, boot: Boot) -> None:
        """Say which boot of the guest it is."""
        self.boot = boot
        value = {"addr": boot.addr, "phys": boot.phys, "value": boot.value.hex()}
        self._note({"boot": value})

    def note_init_text(self, text: InitText) -> None:
        """Say where the text is that the guest's boot frees."""
        self._note({"init_text": asdict(text) | {"head": text.head.hex()}})

    def note_guardian(self, pid: int) -> None:
        """Say who watches over us."""
        self._note({"guardian": [pid, process_start(pid)]})

    def note_mark(self, place: MarkPlace) -> None:
        """Say where the mark is now."""
        self._note({"marked": {"loan": place.allocation, "phys": place.phys}})
        self._marked = place

    def note_held(self, *, is_held: bool) -> None:
        """Say whether somebody else has paused the guest, so that nobody lets it run for us."""
        self._note({"held": is_held})

    def identify(
        self,
        *,
        build_id: bytes,
        release: str,
        image: Path | None = None,
        symbols: Path | None = None,
    ) -> None:
        """Say which kernel it is."""
        files = {"image": image, "symbols": symbols}
        named = {what: str(path.resolve()) if path else "" for what, path in files.items()}
        self._note({"build_id": build_id.hex(), "release": release, **named})

    def point(self, window: RamMap) -> None:
        """Say how others can look at the guest meanwhile; with this machine it ends, too."""
        self._note({"window": asdict(window)})
        self._must_sync = False

    def describe(self, probes: Iterable[ArmedProbe]) -> None:
        """Say which probes the next patches are for, all that their sites will have."""
        found = list(probes)
        self._probes |= by_site(found)
        # What is to be put back does not depend on it: the next record takes it to the disk.
        self._append(probes_line(found))

    def record(self, patches: Sequence[ArmedPatch]) -> None:
        """Write undos down; only then may their patches be made."""
        self._is_clear = False
        state = self.state + 1
        self._append(patches_line(patches, state), is_synced=True)
        # Not before: what could not be written has not begun.
        self.state = state

    def restored(self, patches: Sequence[ArmedPatch], sites: Iterable[Addr]) -> None:
        """Forget some undos: what they were for is as it was, and nothing is at some sites."""
        gone = list(sites)
        for site in gone:
            self._probes.pop(site, None)
        state = self.state + 1
        places = {"phys": [p.phys for p in patches], "new": [p.new.hex() for p in patches]}
        line = {"restored": places, "sites": gone, "state": state}
        # Who puts them back once more finds them as they were.
        self._append(line_of(line))
        self.state = state

    def clear(self) -> None:
        """Forget all undos: the guest's text is as it was. More may be recorded."""
        self.keep(())

    def keep(self, patches: Sequence[ArmedPatch]) -> None:
        """Forget all undos but some: what the others were for is as it was."""
        sites = {patch.addr for patch in patches}
        self._probes = {site: each for site, each in self._probes.items() if site in sites}
        self._write_patches(patches, self.state + bool(patches or not self._is_clear))

    def _write_patches(self, patches: Sequence[ArmedPatch], state: int) -> None:
        probes = (probe for each in self._probes.values() for probe in each)
        lines = probes_line(probes) + patches_line(patches, state)
        self._replace(lines, is_synced=bool(patches))
        self._is_clear, self.state = not patches, state

    def close(self) -> None:
        """Remove the journal, unless there is still something to put back."""
        if self.is_done:
            self.remove()
        else:
            self._note({"closed": True})

    def remove(self) -> None:
        """Forget everything: there is nothing to put back, or no guest any more."""
        self.path.unlink(missing_ok=True)

    def _note(self, value: dict[str, Any]) -> None:
        line = line_of(value)
        with self._lock:
            self._append(line)
            self._head += line

    def _replace(self, lines: bytes, *, is_synced: bool = False) -> None:
        # In one step: a journal without its first lines would help nobody.
        new = self.path.with_suffix(".new")
        with self._lock, self._as_state_errors():
            with directories.create_own(new) as file:
                file.write(self._head + lines)
                if is_synced and self._must_sync:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(self.path)

    def _append(self, line: bytes, *, is_synced: bool = False) -> None:
        with self._lock, self._as_state_errors(), self.path.open("ab", buffering=0) as file:
            begin, rest = file.seek(0, os.SEEK_END), memoryview(line)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                if is_synced and self._must_sync:
                    self._sync(file.fileno())
            except BaseException:
                # Half a line would hide the next one.
                os.ftruncate(file.fileno(), begin)
                raise

    def _sync(self, file: int) -> None:
        os.fsync(file)
        if not self._is_listed:
            _sync_directory(self.path.parent)
            self._is_listed = True

    @contextmanager
    def _as_state_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise StateError(f"cannot write {self.path}: {error.strerror}") from error


def directory() -> Path:
    """Return where journals are kept."""
    return directories.state() / "journal"


def entries(warn: Callable[[KprobesError], None] = _log.warning) -> Iterator[Entry]:
    """Yield every journal on this machine, oldest first; ``warn`` gets why a file is none.

    Raises:
        StateError: the directory is somebody else's.
    """
    folder = directory()
    if not directories.check(folder, top=directories.state()):
        return
    for path in sorted(folder.glob("*.jsonl"), key=_written_at):
        try:
            yield read(path)
        except (FormatError, StateError) as error:
            warn(error)
        except FileNotFoundError:
            # Its session has just ended.
            continue


def at_work(is_target: Callable[[str], bool]) -> Entry | None:
    """Return the journal of another process that has probes armed in a target now, or None."""
    folder = directory()
    if not directories.check(folder, top=directories.state()):
        return None
    for path in folder.glob("*.jsonl"):
        # Named after their process. Others' patches are not read, which may take a while.
        pid = path.name.partition("-")[0]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            continue
        with suppress(*_BROKEN, KprobesError):
            with path.open("rb") as file:
                target = json.loads(file.readline(_LONGEST_LINE))["target"]
            if is_target(target) and (entry := read(path)).patches and not entry.is_abandoned:
                return entry
    return None


def unfinished() -> Iterator[Entry]:
    """Yield the journals of tracers that were killed, as were their guardians."""
    for path in directory().glob("*.jsonl"):
        # Named after their process: one at work is not read, which may take a while.
        if Path("/proc", path.name.partition("-")[0]).exists():
            continue
        with suppress(FormatError, StateError, FileNotFoundError):
            entry = read(path)
            if entry.is_abandoned and not entry.is_watched:
                yield entry


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read(path: Path) -> Entry:
    """Read one journal.

    A torn last line, of a tracer that was killed while it wrote it, is left out: nothing was made.

    Raises:
        FormatError: it is not a journal.
        StateError: it is not a file, or somebody else's.
        FileNotFoundError: there is none.
    """
    try:
        values = _lines(path)
        patches, probes = armed(values)
        info = {key: value for line in values for key, value in line.items()}
        return Entry(
            path=path,
            target=str(info["target"]),
            build_id=str(info.get("build_id", "")),
            release=str(info.get("release", "")),
            pid=int(info["pid"]),
            started=str(info["started"]),
            patches=patches,
            mark=_mark_of(info["mark"]),
            marked=_marked_of(info["marked"]) if "marked" in info else None,
            state=int(info.get("state", 0)),
            boot=_boot_of(info["boot"]) if "boot" in info else None,
            init_text=_init_text_of(**info["init_text"]) if "init_text" in info else None,
            guardian=_guardian_of(*info.get("guardian", (0, ""))),
            is_held=info.get("held", False) is True,
            is_closed="closed" in info,
            image=str(info.get("image", "")),
            symbols=str(info.get("symbols", "")),
            allocations=AllocationLog.replayed(values),
            probes=probes,
            window=_window(info["window"]) if "window" in info else None,
        )
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        raise FormatError(f"{path} is not a journal of ours: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    match error:
        case RecursionError():
            return "nested too deep"
        case KeyError():
            return f"it has no {error}"
        case OSError():
            return str(error.strerror)
        case _:
            return str(error)


def _mark_of(text: str) -> bytes:
    mark = bytes.fromhex(text)
    if len(mark) != _MARK or not any(mark):
        # What is everywhere in a guest's memory proves nothing.
        raise ValueError(f"its mark is not {_MARK} random bytes")
    return mark


def _mark_place(marked: MarkPlace | None, allocations: AllocationLog) -> Phys | None:
    # While the guest takes the memory back nobody knows what is in it.
    returned = allocations.call.returns if allocations.call is not None else None
    data = {each.addr for each in allocations.live if each.kind is Kind.DATA and each != returned}
    return marked.phys if marked is not None and marked.allocation in data else None


def _guardian_of(pid: int, began: str) -> tuple[int, str]:
    return int(pid), str(began)


def _boot_of(item: dict[str, Any]) -> Boot:
    value = bytes.fromhex(item["value"])
    return Boot(addr=Addr(int(item["addr"])), phys=Phys(int(item["phys"])), value=value)


def _init_text_of(start: int, stop: int, state: int, phys: int, head: str) -> InitText:
    return InitText(
        start=Addr(int(start)),
        stop=Addr(int(stop)),
        state=Phys(int(state)),
        phys=Phys(int(phys)),
        head=bytes.fromhex(head),
    )


def _marked_of(item: dict[str, Any]) -> MarkPlace:
    return MarkPlace(allocation=Addr(int(item["loan"])), phys=Phys(int(item["phys"])))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", json.loads(line)) for line in _raw_lines(path)]


def _raw_lines(path: Path) -> list[bytes]:
    with directories.open_own(path) as file:
        if os.fstat(file.fileno()).st_size > _MAX_SIZE:
            raise ValueError(f"larger than {_MAX_SIZE >> 20} MiB")
        return file.read().split(b"\n")[:-1]


def process_start(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; "" when there is none.

    A zombie has ended; where nobody collects them one stays for good.
    """
    # proc(5): fields 3 and 22 of stat; the name before them may hold blanks and brackets.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _window(item: dict[str, Any]) -> RamMap | None:
    if "registers" not in item:
        # Of a release that knew one architecture only. It is for looking: restoring needs none.
        return None
    return RamMap(
        pid=int(item["pid"]),
        started=str(item["started"]),
        runs=tuple((int(start), int(size), int(addr)) for start, size, addr in item["runs"]),
        arch=str(item["arch"]),
        registers={str(name): int(value) for name, value in item["registers"].items()},
    )


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
