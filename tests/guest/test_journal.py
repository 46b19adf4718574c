"""The undo journal: on disk before anything is written, readable after every kind of death."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typing_extensions import Buffer

from kprobes.errors import FormatError, KprobesError, StateError, UnreachableError
from kprobes.guest import journal
from kprobes.guest.allocations import Allocation, Call, Kind
from kprobes.guest.armed import ArmedPatch, ArmedProbe, line_of
from kprobes.guest.attach import attach
from kprobes.guest.journal import Entry, Journal, RamMap
from kprobes.units import Addr, Phys
from tests.build.journals import make_entry
from tests.build.turns import short_switch_interval

TARGET = "/run/guest.sock"


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def undo(phys: int, old: bytes, new: bytes, what: str = "vfs_read") -> ArmedPatch:
    return ArmedPatch(phys=Phys(phys), addr=Addr(phys + 0xFFFF_0000), old=old, new=new, what=what)


UNDOS = [undo(0x10, b"\x0f\x1f\x44\x00\x00", b"\xe8abcd"), undo(0x40, b"\0" * 8, b"\1" * 8, "ö")]


def _written(patches: list[ArmedPatch] = UNDOS) -> Journal:
    made = Journal.create(TARGET)
    made.identify(build_id=b"\xab\xcd", release="6.1.0")
    for one in patches:
        made.record([one])
    return made


def test_what_was_written_is_read_back() -> None:
    made = _written()

    entry = journal.read(made.path)

    assert entry == Entry(
        path=made.path,
        target=TARGET,
        build_id="abcd",
        release="6.1.0",
        pid=os.getpid(),
        started=journal.process_start(os.getpid()),
        patches=tuple(UNDOS),
        mark=made.mark,
        state=2,
        allocations=entry.allocations,
    )


DATA = Allocation(kind=Kind.DATA, addr=0, size=4096)


def _allocated(made: Journal) -> Allocation:
    made.allocations.begin(Call(frame=1, trap=2, allocates=DATA))
    made.allocations.end(0x1000)
    (allocation,) = made.allocations.live
    return allocation


def test_allocations_are_read_back() -> None:
    made = _written([])
    allocation = _allocated(made)

    entry = journal.read(made.path)

    assert entry.allocations.live == (allocation,)
    assert not entry.is_done


def test_what_is_allocated_outlasts_the_undos() -> None:
    made = _written()
    allocation = _allocated(made)

    made.clear()
    made.close()

    entry = journal.read(made.path)
    assert (entry.patches, entry.allocations.live, entry.mark) == ((), (allocation,), made.mark)
    assert entry.has_only_memory


def test_a_journal_whose_guest_has_everything_back_is_removed() -> None:
    made = _written()
    allocation = _allocated(made)
    made.clear()
    made.allocations.begin(Call(frame=1, trap=2, returns=allocation))
    made.allocations.end(0)

    made.close()

    assert not made.path.exists()


def _described(definition: str = "p:open f") -> ArmedProbe:
    site, entry = Addr(0xFFFF_FFFF_8100_0000), Addr(0xFFFF_FFFF_C000_0000)
    return ArmedProbe(site=site, entry=entry, event_id=3, definition=definition)


def test_probes_are_described_until_their_patches_are_gone() -> None:
    made = Journal.create(TARGET)
    made.describe([_described(), _described("p f x=%di")])
    made.record(UNDOS)

    armed = journal.read(made.path).probes
    made.clear()

    assert armed == (_described(), _described("p f x=%di"))
    assert journal.read(made.path).probes == ()


def test_a_dead_tracer_s_journal_goes_on_without_its_descriptions() -> None:
    made = Journal.create(TARGET)
    made.describe([_described()])
    made.record(UNDOS)

    again = Journal.reopen(journal.read(made.path))
    again.forget_undos()

    assert journal.read(made.path).probes == ()


def test_a_window_to_the_guest_is_read_back_and_outlasts_the_patches() -> None:
    window = RamMap(
        pid=7,
        started="123",
        runs=((0, 1 << 29, 0x7F00_0000_0000),),
        arch="x86_64",
        registers={"cr3": 0x4000},
    )
    made = _written()
    made.point(window)
    made.clear()

    assert journal.read(made.path).window == window


def test_a_window_of_a_release_before_arm64_is_none_and_its_undos_are_read() -> None:
    made = _written()
    with made.path.open("a") as file:
        file.write('{"window": {"pid": 7, "started": "1", "runs": [], "root": 4096}}\n')

    found = journal.read(made.path)

    assert found.window is None
    assert found.patches == journal.read(_written().path).patches


def test_a_dead_tracer_s_journal_goes_on_with_its_undos_until_they_are_done() -> None:
    made = _written()
    allocation = _allocated(made)
    with made.path.open("ab") as file:
        file.write(b'{"undos": [{"ph')

    again = Journal.reopen(journal.read(made.path))
    again.allocations.begin(Call(frame=1, trap=2, returns=allocation))

    entry = journal.read(made.path)
    assert (entry.target, entry.mark, list(entry.patches)) == (TARGET, made.mark, UNDOS)
    again.forget_undos()
    entry = journal.read(made.path)
    assert (entry.target, entry.mark, entry.patches) == (TARGET, made.mark, ())
    assert entry.allocations.call == Call(frame=1, trap=2, returns=allocation)


@pytest.fixture
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_no_umask")
def test_a_journal_is_its_user_s_alone_at_each_level(tmp_path: Path) -> None:
    made = Journal.create(TARGET)
    made.record(UNDOS)
    made.keep(UNDOS[:1])

    levels = [made.path, *made.path.parents]
    ours = levels[: levels.index(tmp_path)]
    assert [path.stat().st_mode & 0o777 for path in ours] == [0o600, 0o700, 0o700]


def test_wider_directories_of_ours_are_narrowed(tmp_path: Path) -> None:
    _written()
    for name in ("kprobes/journal", "kprobes"):
        (tmp_path / name).chmod(0o777)

    assert len(list(journal.entries(_raise))) == 1

    assert [
        (tmp_path / name).stat().st_mode & 0o777 for name in ("kprobes", "kprobes/journal")
    ] == [
        0o700,
        0o700,
    ]


def test_the_journals_of_another_user_are_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _written()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    for act in (lambda: list(journal.entries()), lambda: Journal.create(TARGET)):
        with pytest.raises(StateError, match=r"kprobes belongs to .*set XDG_STATE_HOME to"):
            act()
    with pytest.raises(StateError, match="belongs to"):
        journal.read(made.path)


def test_a_relative_home_would_be_another_in_each_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")

    assert journal.directory() == Path.home() / ".local/state/kprobes/journal"


def _raise(error: KprobesError) -> None:
    raise error


def _make_deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000 + b"\n")


def _make_torn(path: Path) -> None:
    path.write_bytes(b'{"target": "x", "pi')


def _make_writable(path: Path) -> None:
    path.write_bytes(_written().path.read_bytes())
    path.chmod(0o666)


def _make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def _make_loop(path: Path) -> None:
    path.symlink_to(path)


def _make_provable_anywhere(path: Path, mark: str = "") -> None:
    made = _written()
    text = made.path.read_text()
    made.path.unlink()
    path.write_text(text.replace(made.mark.hex(), mark))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_make_deep, "nested too deep"),
        (Path.mkdir, "is not a file"),
        (os.mkfifo, "is not a file"),
        (_make_torn, "it has no 'target'"),
        (Path.touch, "it has no 'target'"),
        (_make_writable, "can be written by others"),
        (_make_huge, "larger than 256 MiB"),
        (_make_loop, "symbolic links"),
        (_make_provable_anywhere, "its mark is not 16 random bytes"),
        (partial(_make_provable_anywhere, mark="00" * 16), "its mark is not 16 random bytes"),
    ],
)
def test_a_broken_journal_is_named_and_stops_no_other(
    spoil: Callable[[Path], None], why: str
) -> None:
    kept = _written()
    broken = journal.directory() / "broken.jsonl"
    spoil(broken)
    told: list[KprobesError] = []

    found = [entry.path for entry in journal.entries(told.append)]

    assert kept.path in found
    assert broken not in found
    (error,) = told
    assert str(broken) in str(error)
    assert why in str(error)


def test_two_journals_of_one_process_are_two() -> None:
    assert Journal.create(TARGET).path != Journal.create(TARGET).path


def test_a_journal_of_this_process_is_not_abandoned() -> None:
    assert not journal.read(_written().path).is_abandoned


def test_a_journal_of_a_process_that_is_gone_is_abandoned() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    made = _written()
    text = made.path.read_bytes().replace(str(os.getpid()).encode(), str(child).encode(), 1)
    made.path.write_bytes(text)

    assert journal.read(made.path).is_abandoned


@pytest.mark.parametrize("kept", range(1, 200, 7))
def test_a_torn_last_line_is_left_out(kept: int) -> None:
    made = _written()
    whole = made.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    last = lines[-1][: min(kept, len(lines[-1]) - 1)]
    made.path.write_bytes(b"".join(lines[:-1]) + last)

    assert journal.read(made.path).patches == tuple(UNDOS[:-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n",
        b"not json\n",
        b"[1, 2]\n",
        b'"target"\n',
        b'{"target": "x", "pid": "y"}\n',
        b'{"target": "x", "pid": 1, "started": "2", "undos": 5}\n',
        b'{"target": "x", "pid": 1, "started": "2", "undos": [{}]}\n',
        b'{"target": "x", "pid": 1, "started": "2", "undos": [{"phys": 1, "old": "zz"}]}\n',
        b'{"target": "x", "pid": 1e999}\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)

    with pytest.raises(FormatError, match="not a journal of ours"):
        journal.read(path)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damage_is_told_or_harmless(damage: bytes, at: int) -> None:
    path = journal.directory() / "damaged.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray(b'{"target": "x", "pid": 1, "started": "2"}\n' * 2 + _UNDO_LINE * 2)
    data[at : at + len(damage)] = damage
    path.write_bytes(data)

    try:
        found = len(journal.read(path).patches)
    except FormatError:
        found = 0

    assert found <= 2


_UNDO_LINE = b'{"undos": [{"phys": 1, "addr": 2, "old": "00", "new": "01", "what": ""}]}\n'


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was synced: inode, and its size then. Nothing but the call itself shows it."""
    found: list[tuple[int, int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        found.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def _state_of(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_size


def test_undos_of_a_guest_elsewhere_are_on_the_disk_when_they_are_said_to_be(
    synced: list[tuple[int, int]],
) -> None:
    made = Journal.create(TARGET)
    made.identify(build_id=b"\xab\xcd", release="6.1.0")
    assert synced == [], "nothing is to be put back yet"

    made.record(UNDOS[:1])
    first = [_state_of(made.path), _state_of(made.path.parent)]
    made.record(UNDOS[1:])
    second = _state_of(made.path)
    made.keep(UNDOS[:1])

    assert synced == [*first, second, _state_of(made.path)]


def test_nothing_waits_for_the_disk_of_a_guest_that_ends_with_it(
    synced: list[tuple[int, int]],
) -> None:
    made = Journal.create(TARGET)
    made.point(RamMap(pid=1, started="7", runs=(), arch="x86-64", registers={}))

    made.record(UNDOS)
    made.keep(UNDOS[:1])
    Journal.reopen(journal.read(made.path)).record(UNDOS[1:])

    assert synced == []


def test_after_clearing_more_can_be_recorded() -> None:
    made = _written()

    made.clear()
    made.record(UNDOS[:1])

    entry = journal.read(made.path)
    assert (entry.target, entry.release, entry.patches) == (TARGET, "6.1.0", tuple(UNDOS[:1]))


def test_closing_keeps_what_is_still_to_be_put_back() -> None:
    armed, done = _written(), _written()
    done.clear()

    for made in (armed, done):
        made.close()

    assert (armed.path.exists(), done.path.exists()) == (True, False)
    assert (armed.is_clear, done.is_clear) == (False, True)


def test_all_journals_are_found_the_oldest_first_and_nothing_else() -> None:
    first, second = _written(), _written()
    os.utime(first.path, (1, 1))
    os.utime(second.path, (2, 2))
    (journal.directory() / "other.jsonl").write_bytes(b"no journal\n")
    (journal.directory() / "notes.txt").write_bytes(b"no journal either\n")

    assert [entry.path for entry in journal.entries()] == [first.path, second.path]


def test_a_journal_that_goes_away_meanwhile_is_no_error() -> None:
    kept = _written()
    (journal.directory() / "gone.jsonl").symlink_to("nowhere")

    assert [entry.path for entry in journal.entries()] == [kept.path]


def test_without_a_single_journal_there_are_none() -> None:
    assert list(journal.entries()) == []


def test_a_journal_is_lines_of_json_that_people_can_read() -> None:
    made = _written()

    lines = [json.loads(line) for line in made.path.read_text().splitlines()]

    assert lines[0]["target"] == TARGET
    assert lines[2]["undos"]["old"] == ["0f1f440000"]


def test_a_process_that_got_a_dead_tracers_number_is_not_the_tracer() -> None:
    entry = make_entry("x", is_live=True)

    assert not entry.is_abandoned
    assert replace(entry, started="1").is_abandoned


def test_what_is_kept_is_there_with_its_probes_and_the_rest_is_forgotten() -> None:
    made, (first, second) = _written([]), UNDOS
    made.describe(_of(each) for each in UNDOS)
    made.record(UNDOS)

    made.keep([second])
    entry = journal.read(made.path)

    assert entry.patches == (second,)
    assert entry.probes == (_of(second),)
    assert not made.is_clear
    made.keep([])
    assert journal.read(made.path).probes == ()
    assert first not in journal.read(made.path).patches


def _of(written: ArmedPatch) -> ArmedProbe:
    return ArmedProbe(site=written.addr, entry=Addr(1), event_id=2, definition=written.what)


def test_a_state_that_the_guest_has_not_heard_of_outlasts_every_attempt_to_put_it_right() -> None:
    made = _written()

    for _ in range(3):
        Journal.reopen(journal.read(made.path)).forget_undos()

    assert (journal.read(made.path).state, journal.read(made.path).patches) == (made.state, ())


@contextmanager
def _tracer_at_work(definitions: Sequence[str]) -> Generator[int]:
    # A process of its own: its journal is one of another tracer.
    parent, child = os.pipe()
    pid = os.fork()
    if pid == 0:
        made = _written()
        made.describe([ArmedProbe(Addr(1), Addr(2), n, text) for n, text in enumerate(definitions)])
        os.write(child, b"!")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(parent, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(parent)
        os.close(child)


def test_another_tracer_of_the_same_guest_is_found_and_refused_with_what_it_traces() -> None:
    _written()
    assert journal.at_work(lambda target: target == TARGET) is None

    with _tracer_at_work(["p vfs_read", "p vfs_write", "p vfs_write"]) as pid:
        assert journal.at_work(lambda target: target != TARGET) is None
        told = rf"process {pid} is tracing this guest \(p vfs_read and 1 more\)"
        with pytest.raises(UnreachableError, match=told):
            attach(f"qemu:{TARGET}")

    assert journal.at_work(lambda target: target == TARGET) is None


def test_no_line_of_one_thread_is_lost_while_another_replaces_the_file() -> None:
    # As when somebody pauses the guest while a module's probes are armed.
    made = _written()
    with short_switch_interval():
        for number in range(1, 201):
            turns = threading.Barrier(2)

            def note(turns: threading.Barrier = turns) -> None:
                turns.wait()
                made.note_held(is_held=True)

            other = threading.Thread(target=note)
            other.start()
            turns.wait()
            made.keep(UNDOS)
            other.join()
            assert made.path.read_text().count('"held"') == number


def test_a_command_line_that_is_no_text_is_written_and_read() -> None:
    value = {"target": "qemu:/tmp/\udce4/ä", "phys": [0xFFFF_FFFF_8100_0000]}

    assert json.loads(line_of(value)) == value


class _Full(FileIO):
    """A file on a disk that has room for half of a line."""

    def write(self, data: Buffer) -> int:
        if len(memoryview(data)) < _HALF:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[: len(memoryview(data)) // 2])


_HALF = 60


def test_a_line_that_does_not_fit_is_not_there_and_hides_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = _written(UNDOS[:1])
    before, state = made.path.read_bytes(), made.state

    def full(path: Path, mode: str, **options: object) -> FileIO:
        del options
        return _Full(path, mode)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(StateError, match="No space left on device"):
        made.record(UNDOS[1:])
    monkeypatch.undo()

    assert (made.path.read_bytes(), made.state) == (before, state)
    made.record(UNDOS[1:])
    assert journal.read(made.path).patches == tuple(UNDOS)


def test_a_line_that_nobody_waited_for_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _written(UNDOS[:1])
    before, state = made.path.read_bytes(), made.state

    def interrupt(file: int) -> None:
        del file
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.record(UNDOS[1:])

    assert (made.path.read_bytes(), made.state) == (before, state)
