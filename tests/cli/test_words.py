"""Journals, sessions and sites in words and as JSON."""

import os

import pytest
from msgspec.structs import replace

from kprobes.cli import words
from kprobes.cli.words import guest_as_text, journal_as_text, session_as_text
from kprobes.host.owner import Owner as Tracer
from kprobes.host.owner import new_owner
from kprobes.host.sessions import Session
from kprobes.inspect.status import ArmedSite, Owner, Status
from kprobes.units import Addr
from tests.build.journals import make_entry, make_patch
from tests.build.json_lines import objects

FLAGS = make_patch(0x9000, what="dyn_ftrace.flags")


@pytest.mark.parametrize(
    ("target", "is_live", "text"),
    [
        ("localhost:1234", True, "which is at work"),
        (
            "localhost:1234",
            False,
            "`kprobe restore` puts it right; the guest may stand still until then",
        ),
        (
            "/tmp/kprobes-zzzzzzzz/gdb.sock",
            False,
            ": both have ended; `kprobe restore` removes the journal",
        ),
    ],
)
def test_a_journal_says_which_guest_and_by_whom(target: str, is_live: bool, text: str) -> None:
    entry = make_entry(target, FLAGS, make_patch(16), is_live=is_live)

    line = journal_as_text(entry, is_brief=True, is_verbose=False)

    head = f"{target} (6.1.0-56-cloud-amd64): 1 site armed by process {entry.pid}"
    assert line.startswith(head)
    assert line.endswith(f"{text}\n")


def test_a_journal_without_patches_has_nothing_armed() -> None:
    assert "nothing armed by process" in journal_as_text(
        make_entry("localhost:1"), is_brief=False, is_verbose=False
    )


def test_a_tracer_that_ended_by_itself_was_not_killed() -> None:
    left = replace(make_entry("localhost:1"), is_closed=True)
    armed = replace(make_entry("localhost:1", make_patch(16)), is_closed=True)

    shown = [journal_as_text(each, is_brief=True, is_verbose=False) for each in (left, armed)]

    assert shown[0].endswith("which has ended: `kprobe restore` gives the memory back\n")
    assert "`kprobe restore` puts it right" in shown[1]


def test_sites_of_a_journal_are_its_patches_of_text() -> None:
    entry = make_entry(
        "localhost:1", FLAGS, make_patch(16, what="open"), make_patch(32, what="read")
    )

    shown = journal_as_text(entry, is_brief=False, is_verbose=False)

    assert shown.partition("\n")[2] == (
        "    0xffffffff81000010  open\n    0xffffffff81000020  read\n"
    )


def test_many_sites_are_cut_short_unless_all_are_wanted() -> None:
    entry = make_entry("localhost:1", *(make_patch(n) for n in range(25)))

    few = journal_as_text(entry, is_brief=False, is_verbose=False)
    every = journal_as_text(entry, is_brief=False, is_verbose=True)

    assert few.endswith("    ... and 5 more (-v shows all)\n")
    assert every.count("\n") == 1 + 25


def make_site(where: str, owner: Owner, event: str = "") -> ArmedSite:
    return ArmedSite(addr=Addr(1), where=where, code=b"\xe8\1\2\3\4", owner=owner, event=event)


def test_sites_are_grouped_by_who_armed_them() -> None:
    armed = (
        make_site("vfs_read+0x0", Owner.JOURNAL, "read"),
        make_site("vfs_open+0x0", Owner.GUEST),
        make_site("vfs_write+0x0", Owner.JOURNAL, "write"),
    )

    text = guest_as_text(Status(release="6.1", sites=3500, armed=armed), is_verbose=False)

    assert text == (
        "6.1: 3,500 ftrace sites, 3 armed\n"
        "  2 armed by kprobe on this machine\n"
        "    vfs_read+0x0   read\n"
        "    vfs_write+0x0  write\n"
        "  1 used by the guest's own ftrace\n"
        "    vfs_open+0x0  e801020304\n"
    )


def test_an_idle_guest_is_said_to_be_idle() -> None:
    text = guest_as_text(Status(release="6.1", sites=3500, armed=()), is_verbose=False)

    assert text == "6.1: 3,500 ftrace sites, all of them idle\n"


LINES = ("p:kprobes_1_2_3/open do_sys_openat2 dfd=%si:s32", "r8:kprobes_1_2_3/back vfs_read")
DEAD = Tracer(pid=1 << 22, started="7", session=1)


def test_a_session_of_this_machine_says_which_events_and_by_whom() -> None:
    shown = session_as_text(Session(owner=new_owner(), lines=LINES), is_verbose=False)

    assert shown == (
        f"this machine's kernel: 2 events of process {os.getpid()}, which is at work\n"
        "    p:kprobes_1_2_3/open   do_sys_openat2 dfd=%si:s32\n"
        "    r8:kprobes_1_2_3/back  vfs_read\n"
    )


def test_a_session_that_nobody_may_look_at_is_told_by_its_journal() -> None:
    shown = session_as_text(Session(owner=DEAD, lines=None), is_verbose=False)

    assert shown == (
        f"this machine's kernel: a recording of process {DEAD.pid}, which was killed: "
        "`kprobe restore` takes away what is left\n"
    )


def test_programs_get_an_object_per_line() -> None:
    entry = make_entry("localhost:1", FLAGS, make_patch(16, what="open"), is_live=False)
    site = make_site("vfs_read+0x0", Owner.GUEST)

    lines = (
        words.journal_as_json(entry, is_brief=True, is_verbose=False),
        words.session_as_json(Session(owner=DEAD, lines=LINES), is_verbose=False),
        words.guest_as_json(Status(release="6.1", sites=9, armed=(site,)), is_verbose=False),
    )

    journal, session, guest = objects("status", "".join(lines))
    assert (journal["target"], journal["is_at_work"]) == ("localhost:1", False)
    assert journal["sites"] == [{"address": "0xffffffff81000010", "event": "open"}]
    assert session == {
        "target": "host",
        "pid": DEAD.pid,
        "is_at_work": False,
        "instance": f"instances/kprobes-{DEAD.pid}-7-1",
        "events": [*LINES],
    }
    assert (guest["ftrace_sites"], guest["armed"][0]["owner"]) == (9, "guest")
