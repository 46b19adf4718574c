"""``kprobe targets`` in words and as JSON, of guests that are given to it."""

import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.cli import targets
from kprobes.cli.main import make_parsers
from kprobes.guest.journal import Entry
from kprobes.host import obstacles
from kprobes.host.obstacles import Obstacle
from kprobes.inspect.targets import LocalGuest
from kprobes.transport.running import Qemu
from kprobes.units import MIB
from tests.build.json_lines import objects
from tests.build.qemus import command_line

COMMAND = command_line(
    "qemu-system-x86_64 -name one -m 256 -machine q35 -kernel /boot/vmlinuz "
    "-gdb unix:/gdb.sock,server=on -qmp unix:/qmp.sock,server=on"
)
GUEST = LocalGuest(
    name="name:one",
    qemu=Qemu(pid=77, command=COMMAND, files=None, ram=None),
    is_paused=False,
    release="6.1.0",
    build_id="abcd",
    is_stub_free=True,
    ram="stub",
    tracers=(),
)
ENTRY = Entry(
    path=Path("/journal"),
    target="/gdb.sock",
    build_id="",
    release="",
    pid=1,
    started="",
    patches=(),
)


def shown(
    monkeypatch: pytest.MonkeyPatch, *guests: LocalGuest, words: str = "", is_free: bool = True
) -> list[str]:
    """Return the lines that are printed of some guests and this machine."""

    def local_guests(entries: object) -> list[LocalGuest]:
        del entries
        return list(guests)

    why = [] if is_free else [Obstacle(subject="root", found="not root", advice="sudo")]
    monkeypatch.setattr("kprobes.inspect.targets.local_guests", local_guests)
    monkeypatch.setattr(obstacles, "obstacles", lambda: why)
    out = io.BytesIO()
    args = make_parsers("targets")[0].parse_args(["targets", *words.split()])
    assert targets.run(args, out) == 0
    return out.getvalue().decode().splitlines()


def test_a_guest_is_a_line_and_this_machine_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    head, guest, host = shown(monkeypatch, GUEST)
    assert head.split() == [word for words in targets.HEAD for word in words.split()]
    assert guest.split("  ")[0] == "name:one"
    for words in ("77", "amd64, 1 CPU, 256 MiB, tcg", "running", "6.1.0", "/gdb.sock", "stub"):
        assert f"  {words}  " in f"{guest}  "
    assert host.startswith("host ")
    assert host.endswith("  can be probed")


def test_what_is_not_known_and_who_is_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    qemu = replace(GUEST.qemu, command=replace(COMMAND, monitors=()))
    used = replace(
        GUEST, qemu=qemu, is_paused=None, release="", is_stub_free=False, tracers=(ENTRY,)
    )
    _, guest, host = shown(monkeypatch, used, is_free=False)
    for words in ("?", "/gdb.sock (in use)", "-", "0 sites by process 1 (ended)"):
        assert f"  {words}  " in f"{guest}  "
    assert guest.split().count("?") == 2
    assert host.endswith("  cannot be probed: not root")


def test_a_guest_that_cannot_be_reached_has_a_line_of_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = replace(COMMAND, stubs=(), monitors=())
    qemu = replace(GUEST.qemu, command=command)
    shut = replace(GUEST, qemu=qemu, is_paused=True)
    _, guest, _, advice = shown(monkeypatch, shut)
    assert "  paused  " in guest
    assert advice == f"name:one: {command.advice}"
    assert "-s" in advice


def test_json_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, replace(GUEST, tracers=(ENTRY,)), words="--format json")
    guest, host = objects("targets", "\n".join(lines))
    assert (guest["target"], guest["pid"], guest["build_id"]) == ("name:one", 77, "abcd")
    assert (guest["memory"], guest["machine"]) == (256 * MIB, "q35")
    assert guest["tracers"] == [{"pid": 1, "is_at_work": False, "sites": 0}]
    assert (host["target"], host["obstacles"]) == ("host", [])
