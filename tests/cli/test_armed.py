"""Journals and sites in words."""

import pytest

from kprobes.cli.armed import journal_text, sites_text, status_text
from kprobes.drivers.status import ArmedSite, Owner, Status
from kprobes.units import Addr
from tests.build.journals import make_entry, make_undo

FLAGS = make_undo(0x9000, what="dyn_ftrace.flags")


@pytest.mark.parametrize(
    ("target", "is_live", "text"),
    [
        ("localhost:1234", True, "which is at work"),
        ("localhost:1234", False, "which was killed: `kprobe restore` puts it right"),
        (
            "/tmp/kprobes-zzzzzzzz/gdb.sock",
            False,
            ": both have ended; `kprobe restore` removes the journal",
        ),
    ],
)
def test_a_journal_says_which_guest_and_by_whom(target: str, is_live: bool, text: str) -> None:
    entry = make_entry(target, FLAGS, make_undo(16), is_live=is_live)

    line = journal_text(entry)

    head = f"{target} (6.1.0-56-cloud-amd64): 1 site armed by process {entry.pid}"
    assert line.startswith(head)
    assert line.endswith(f"{text}\n")


def test_a_journal_without_patches_has_nothing_armed() -> None:
    assert "nothing armed by process" in journal_text(make_entry("localhost:1"))


def test_sites_of_a_journal_are_its_patches_of_text() -> None:
    entry = make_entry("localhost:1", FLAGS, make_undo(16, what="open"), make_undo(32, what="read"))

    assert sites_text(entry, is_verbose=False) == (
        "    0xffffffff81000010  open\n    0xffffffff81000020  read\n"
    )


def test_many_sites_are_cut_short_unless_all_are_wanted() -> None:
    entry = make_entry("localhost:1", *(make_undo(n) for n in range(25)))

    assert sites_text(entry, is_verbose=False).endswith("    ... and 5 more (-v shows all)\n")
    assert sites_text(entry, is_verbose=True).count("\n") == 25


def make_site(where: str, owner: Owner, event: str = "") -> ArmedSite:
    return ArmedSite(addr=Addr(1), where=where, code=b"\xe8\1\2\3\4", owner=owner, event=event)


def test_sites_are_grouped_by_who_armed_them() -> None:
    armed = (
        make_site("vfs_read+0x0", Owner.JOURNAL, "read"),
        make_site("vfs_open+0x0", Owner.GUEST),
        make_site("vfs_write+0x0", Owner.JOURNAL, "write"),
    )

    text = status_text(Status(release="6.1", sites=3500, armed=armed), is_verbose=False)

    assert text == (
        "6.1: 3,500 ftrace sites, 3 armed\n"
        "  2 armed by kprobe on this machine\n"
        "    vfs_read+0x0   read\n"
        "    vfs_write+0x0  write\n"
        "  1 used by the guest's own ftrace\n"
        "    vfs_open+0x0  e801020304\n"
    )


def test_an_idle_guest_is_said_to_be_idle() -> None:
    text = status_text(Status(release="6.1", sites=3500, armed=()), is_verbose=False)

    assert text == "6.1: 3,500 ftrace sites, all of them idle\n"
