"""``kprobe syscalls``: how they are shown; on guests in ``tests/system/test_system_calls.py``."""

from kprobes.cli.syscalls import as_json, as_text
from kprobes.image.system_calls import SystemCall
from tests.build.json_lines import objects

_OPENAT = SystemCall(
    name="openat", number=257, parameters=(("dfd", "int"), ("filename", "const char *"))
)
_GETPID = SystemCall(name="getpid", number=39, parameters=())
_CLONE = SystemCall(name="clone")


def test_each_has_a_line_with_what_is_known() -> None:
    assert as_text([_CLONE, _GETPID, _OPENAT]).splitlines() == [
        "     clone   (?)",
        " 39  getpid  (void)",
        "257  openat  (int dfd, const char *filename)",
    ]


def test_json_has_an_object_for_each() -> None:
    clone, getpid, openat = objects("syscalls", as_json([_CLONE, _GETPID, _OPENAT]))

    assert clone == {"syscall": "clone", "number": None, "args": None}
    assert (getpid["number"], getpid["args"]) == (39, [])
    assert openat["args"] == [
        {"name": "dfd", "type": "int"},
        {"name": "filename", "type": "const char *"},
    ]
