import pytest

from kprobes.lang.names import default_event
from kprobes.model.definition import Kind
from tests.build.definitions import Wrong, caret_of, read


@pytest.mark.parametrize(
    ("head", "group", "event"),
    [
        ("p", "kprobes", "p_vfs_read_0"),
        ("p:x", "kprobes", "x"),
        ("p:a/b", "a", "b"),
        ("p:a.b", "a", "b"),
        ("p:a/", "a", "p_vfs_read_0"),
        ("p:a.", "a", "p_vfs_read_0"),
        ("p:-a/b", "-a", "b"),
        ("p:_9-/_", "_9-", "_"),
        ("p:" + "g" * 63 + "/" + "e" * 63, "g" * 63, "e" * 63),
    ],
)
def test_group_and_event_are_read(head: str, group: str, event: str) -> None:
    found = read(f"{head} vfs_read")

    assert (found.group, found.event) == (group, event)
    assert found.is_named == (event != "p_vfs_read_0")


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p:^ vfs_read", "NO_EVENT_NAME"),
        ("p:^/ev vfs_read", "NO_GROUP_NAME"),
        ("p:^.ev vfs_read", "NO_GROUP_NAME"),
        ("p:^/ vfs_read", "NO_GROUP_NAME"),
        ("p:^9a/b vfs_read", "BAD_GROUP_NAME"),
        ("p:^a.b/c vfs_read", "BAD_GROUP_NAME"),
        ("p:^a:b/c vfs_read", "BAD_GROUP_NAME"),
        ("p:^a$/b vfs_read", "BAD_GROUP_NAME"),
        ("p:a/^b-c vfs_read", "BAD_EVENT_NAME"),
        ("p:a/^b/c vfs_read", "BAD_EVENT_NAME"),
        ("p:a.^b.c vfs_read", "BAD_EVENT_NAME"),
        ("p:^9 vfs_read", "BAD_EVENT_NAME"),
        ("p:^:ev vfs_read", "BAD_EVENT_NAME"),
        ("p:^é vfs_read", "BAD_EVENT_NAME"),
        ("p:^" + "a" * 64 + " vfs_read", "EVENT_TOO_LONG"),
        ("p:^9" + "a" * 64 + " vfs_read", "EVENT_TOO_LONG"),
        ("p:a/^" + "a" * 64 + " vfs_read", "EVENT_TOO_LONG"),
        ("p:^" + "a" * 64 + "/x vfs_read", "GROUP_TOO_LONG"),
        ("p:^" + "a" * 64 + "/ vfs_read", "GROUP_TOO_LONG"),
    ],
)
def test_the_caret_marks_the_wrong_name(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read ^=%di", "NO_ARG_NAME"),
        ("p vfs_read ^9=%di", "BAD_ARG_NAME"),
        ("p vfs_read ^a-b=%zz", "BAD_ARG_NAME"),
        ("p vfs_read ^%di=", "BAD_ARG_NAME"),
        ("p vfs_read ^é=%di", "BAD_ARG_NAME"),
        ('p vfs_read ^\\"a=b"', "BAD_ARG_NAME"),
        ("p vfs_read ^" + "9" * 33 + "=%di", "ARG_NAME_TOO_LONG"),
        ("p vfs_read a=%di ^a=%si", "USED_ARG_NAME"),
        ("p vfs_read arg2=%di ^%si", "USED_ARG_NAME"),
        ("p vfs_read ^common_type=%di", "USED_ARG_NAME"),
        ("p vfs_read ^common_tgid=%zz", "USED_ARG_NAME"),
        ("p vfs_read ^__probe_ip=%di", "USED_ARG_NAME"),
    ],
)
def test_the_caret_marks_the_wrong_argument_name(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize("name", ["a" * 32, "common_cpu", "ip", "_"])
def test_other_names_are_free(name: str) -> None:
    assert read(f"p vfs_read {name}=%di").args[0].name == name


@pytest.mark.parametrize(
    ("symbol", "offset", "name"),
    [
        ("vfs_read", 0, "p_vfs_read_0"),
        ("vfs_read", 16, "p_vfs_read_16"),
        ("ext4:foo", 0, "p_ext4_foo_0"),
        ("foo.isra.0", 0, "p_foo_isra_0_0"),
        ("a" * 80, 0, "p_" + "a" * 61),
    ],
)
def test_events_without_a_name_are_named_after_their_place(
    symbol: str, offset: int, name: str
) -> None:
    assert default_event(Kind.ENTRY, symbol, offset) == name
