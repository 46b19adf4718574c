"""The undo journal: what was about to be written to a guest, on disk before it is written.

One file per session under ``$XDG_STATE_HOME/kprobes/journal``, of JSON lines: which target and
who, which kernel, what it has lent (``drivers.loans``), then a line per group of patches. Each is
on the disk before its patches are made, so that whoever comes after a killed tracer can put every
byte back. What was lent only has to outlive the tracer, not the machine: it is not waited for.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from kprobes import directories
from kprobes.drivers.loans import Ledger
from kprobes.errors import FormatError, KprobesError, StateError
from kprobes.units import Addr, Phys

_log = logging.getLogger(__name__)
_VERSION = 1
_MAX_SIZE = 256 << 20
_MARK = 16
_OF_PATCHES = frozenset({"undos", "probes"})
"""Lines that are forgotten with the patches."""
_BROKEN = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError),
    RecursionError,
)
"""What reading one raises that we did not write, or that was damaged since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo:
    """One write to a guest's RAM: where, what was there and what we put there.

    Attributes:
        phys, addr: its physical and its kernel address.
        old, new: bytes before and after.
        what: the probe or record it belongs to, for people.
    """

    phys: Phys
    addr: Addr
    old: bytes
    new: bytes
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One probe as it was armed, for whoever looks at its code.

    Attributes:
        site: the address that it is at.
        entry: of the code that a hit there leads to.
        event_id: in its records.
        definition: as text.
    """

    site: Addr
    entry: Addr
    event_id: int
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One session's journal as it lies on disk.

    Attributes:
        path: of the file.
        target: the stub's address.
        build_id, release: of the guest's kernel.
        pid, started: of the tracer: its number, and when it began.
        undos: in the order in which they were to be written.
        mark: what the tracer left in the first memory that it was lent: who finds it there
            looks at the guest as it was then, and not as it was booted anew.
        image: of the kernel, where the tracer was given one, else "".
        ledger: what the guest has lent.
        probes: that are armed; of one site in the order in which a hit runs them.
        window: how to look at the guest beside the tracer, or None where that cannot be.
    """

    path: Path
    target: str
    build_id: str
    release: str
    pid: int
    started: str
    undos: tuple[Undo, ...]
    mark: bytes = b""
    image: str = ""
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    probes: tuple[Described, ...] = field(default=(), compare=False)
    window: Window | None = field(default=None, compare=False)

    @property
    def is_done(self) -> bool:
        """Whether the guest is as it was before."""
        return not self.undos and self.ledger.is_settled

    @property
    def is_abandoned(self) -> bool:
        """Whether the tracer that wrote it is gone; another process may have its number now."""
        began = process_start(self.pid)
        return not began or began != self.started


class Journal:
    """A session's journal while it is being written.

    Attributes:
        mark: random bytes that name this session in the guest's memory.
        ledger: what the guest has lent; writes itself down here.
    """

    def __init__(self, path: Path, mark: bytes) -> None:
        self.path = path
        self.mark = mark
        self.ledger = Ledger(self._note)
        self._head = b""
        self._probes: list[Described] = []
        self._is_clear = True

    @classmethod
    def create(cls, target: str) -> "Journal":
        """Begin a journal for one target.

        Raises:
            StateError: there is no place for it that is ours alone.
        """
        folder = directory()
        directories.make(folder, top=directories.state())
        pid = os.getpid()
        journal = cls(folder / f"{pid}-{secrets.token_hex(4)}.jsonl", secrets.token_bytes(_MARK))
        who = {"pid": pid, "started": process_start(pid), "mark": journal.mark.hex()}
        journal._head = _line({"version": _VERSION, "target": target, **who})
        try:
            journal._replace(b"", is_synced=True)
            _sync_directory(folder)
        except OSError as error:
            raise StateError(f"cannot write {journal.path}: {error.strerror}") from error
        return journal

    @classmethod
    def reopen(cls, path: Path) -> "Journal":
        """Go on with the journal of a dead tracer whose undos are all done.

        Raises:
            FormatError: it is no journal.
        """
        journal = cls(path, read(path).mark)
        for line in _lines(path):
            journal.ledger.replay(line)
            if not _OF_PATCHES & line.keys():
                journal._head += _line(line)
        journal.clear()
        return journal

    @property
    def is_clear(self) -> bool:
        """Whether nothing is left to put back."""
        return self._is_clear

    def identify(self, *, build_id: bytes, release: str, image: Path | None = None) -> None:
        """Say which kernel it is."""
        self._say(
            {"build_id": build_id.hex(), "release": release, "image": str(image) if image else ""}
        )

    def point(self, window: Window) -> None:
        """Say how others can look at the guest meanwhile."""
        self._note({"window": asdict(window)})

    def describe(self, probes: Iterable[Described]) -> None:
        """Say which probes the next patches are for."""
        found = list(probes)
        self._probes += found
        # What is to be put back does not depend on it: the next record takes it to the disk.
        self._append(_probes_line(found), is_synced=False)

    def record(self, undos: Iterable[Undo]) -> None:
        """Put undos on the disk; only then may their patches be made."""
        self._is_clear = False
        self._append(_undos_line(undos), is_synced=True)

    def clear(self) -> None:
        """Forget all undos: the guest's text is as it was. More may be recorded."""
        self.keep(())

    def keep(self, undos: Sequence[Undo]) -> None:
        """Forget all undos but some: what the others were for is as it was."""
        sites = {undo.addr for undo in undos}
        self._probes = [each for each in self._probes if each.site in sites]
        kept = _probes_line(self._probes) + _undos_line(undos) if undos else b""
        self._replace(kept, is_synced=bool(undos))
        self._is_clear = not undos

    def close(self) -> None:
        """Remove the journal, unless there is still something to put back."""
        if self._is_clear and self.ledger.is_settled:
            self.remove()

    def remove(self) -> None:
        """Forget everything: there is nothing to put back, or no guest any more."""
        self.path.unlink(missing_ok=True)

    def _say(self, value: dict[str, Any]) -> None:
        self._keep(value, is_synced=True)

    def _note(self, value: dict[str, Any]) -> None:
        self._keep(value, is_synced=False)

    def _keep(self, value: dict[str, Any], *, is_synced: bool) -> None:
        line = _line(value)
        self._append(line, is_synced=is_synced)
        self._head += line

    def _replace(self, lines: bytes, *, is_synced: bool) -> None:
        # In one step: a journal without its first lines would help nobody.
        new = self.path.with_suffix(".new")
        with directories.create_own(new) as file:
            file.write(self._head + lines)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        new.replace(self.path)

    def _append(self, line: bytes, *, is_synced: bool) -> None:
        with self.path.open("ab") as file:
            file.write(line)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())


def directory() -> Path:
    """Return where journals are kept."""
    return directories.state() / "journal"


def entries(tell: Callable[[KprobesError], None] = _log.warning) -> Iterator[Entry]:
    """Yield every journal on this machine, oldest first; ``tell`` gets why a file is none.

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
            tell(error)
        except FileNotFoundError:
            # Its session has just ended.
            continue


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read(path: Path) -> Entry:
    """Read one journal.

    A torn last line is what a tracer leaves that was killed while writing it: its patches were
    never made, so it is left out.

    Raises:
        FormatError: it is no journal.
        StateError: it is no file, or somebody else's.
        FileNotFoundError: there is none.
    """
    try:
        values = _lines(path)
        facts = {key: value for line in values for key, value in line.items()}
        return Entry(
            path=path,
            target=str(facts["target"]),
            build_id=str(facts.get("build_id", "")),
            release=str(facts.get("release", "")),
            pid=int(facts["pid"]),
            started=str(facts["started"]),
            undos=tuple(_from_json(item) for line in values for item in line.get("undos", ())),
            mark=bytes.fromhex(facts.get("mark", "")),
            image=str(facts.get("image", "")),
            ledger=_ledger_of(values),
            probes=tuple(_described(item) for line in values for item in line.get("probes", ())),
            window=_window(facts["window"]) if "window" in facts else None,
        )
    except FileNotFoundError:
        raise
    except _BROKEN as error:
        raise FormatError(f"{path} is no journal of ours: {_reason(error)}") from error


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


def _lines(path: Path) -> list[dict[str, Any]]:
    with directories.open_own(path) as file:
        if os.fstat(file.fileno()).st_size > _MAX_SIZE:
            raise ValueError(f"larger than {_MAX_SIZE >> 20} MiB")
        data = file.read()
    return [cast("dict[str, Any]", json.loads(line)) for line in data.split(b"\n")[:-1]]


def _ledger_of(lines: Iterable[dict[str, Any]]) -> Ledger:
    ledger = Ledger()
    for line in lines:
        ledger.replay(line)
    return ledger


def _probes_line(probes: Iterable[Described]) -> bytes:
    found = [[each.site, each.entry, each.event_id, each.definition] for each in probes]
    return _line({"probes": found})


def _undos_line(undos: Iterable[Undo]) -> bytes:
    return _line({"undos": [_to_json(undo) for undo in undos]})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def process_start(pid: int) -> str:
    """Return when a process began, in clock ticks since boot; "" when there is none."""
    # proc(5): field 22 of stat; the name before it may hold blanks and brackets.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _to_json(undo: Undo) -> dict[str, Any]:
    # Not by ``asdict``, which takes 30 ms for a thousand probes.
    return {
        "phys": undo.phys,
        "addr": undo.addr,
        "old": undo.old.hex(),
        "new": undo.new.hex(),
        "what": undo.what,
    }


def _from_json(item: dict[str, Any]) -> Undo:
    return Undo(
        phys=Phys(int(item["phys"])),
        addr=Addr(int(item["addr"])),
        old=bytes.fromhex(item["old"]),
        new=bytes.fromhex(item["new"]),
        what=str(item["what"]),
    )


def _window(item: dict[str, Any]) -> Window | None:
    if "registers" not in item:
        # Of a release that knew one architecture only. It is for looking: restoring needs none.
        return None
    return Window(
        pid=int(item["pid"]),
        started=str(item["started"]),
        runs=tuple((int(start), int(size), int(addr)) for start, size, addr in item["runs"]),
        arch=str(item["arch"]),
        registers={str(name): int(value) for name, value in item["registers"].items()},
    )


def _described(item: Sequence[Any]) -> Described:
    site, entry, event_id, definition = item
    return Described(
        site=Addr(int(site)),
        entry=Addr(int(entry)),
        event_id=int(event_id),
        definition=str(definition),
    )


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
