import pytest
from hypothesis import given, settings

from kprobes.lang.listing import at_function, show
from tests.build.definitions import definitions, plain, read


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("p vfs_read", "p:kprobes/p_vfs_read_0 vfs_read"),
        ("p vfs_read+0x0", "p:kprobes/p_vfs_read_0 vfs_read"),
        ("p vfs_read+0x10", "p:kprobes/p_vfs_read_16 vfs_read+16"),
        ("p:a.b vfs_read", "p:a/b vfs_read"),
        ("p:a/ vfs_read %di", "p:a/p_vfs_read_0 vfs_read arg1=%di"),
        ("pxy:b  vfs_read a=%di:u8 $COMM", "p:kprobes/b vfs_read a=%di:u8 arg2=$COMM"),
        ("p vfs_read +010(%di)x", "p:kprobes/p_vfs_read_0 vfs_read arg1=+010(%di)x"),
        ("r vfs_read $retval", "r:kprobes/r_vfs_read_0 vfs_read arg1=$retval"),
        ("r0x10:x vfs_read", "r16:kprobes/x vfs_read"),
        ("p:x vfs_read%return", "r:kprobes/x vfs_read"),
        ("p ext4:foo+8", "p:kprobes/p_ext4_foo_8 ext4:foo+8"),
        ("p:x 0x10", "p:kprobes/x 0x0000000000000010"),
        ("p f file:u8 $arg1", "p:kprobes/p_f_0 f file=file:u8 arg2=$arg1"),
        ("p f $arg*:u8 %di", "p:kprobes/p_f_0 f $arg* %di"),
        ("p f $arg* a=%di", "p:kprobes/p_f_0 f $arg* a=%di"),
        ("p f $arg2:string", "p:kprobes/p_f_0 f $arg2:string"),
        ("p f %di:%pd", "p:kprobes/p_f_0 f arg1=%di:%pd"),
        ("p f +0(%di):u8[0x4]", "p:kprobes/p_f_0 f arg1=+0(%di):u8[0x4]"),
        ("p vfs_* %di", "p:kprobes/ vfs_* arg1=%di"),
        ("p:ev vfs_* %di", "p:kprobes/ev vfs_* arg1=%di"),
    ],
)
def test_definitions_are_listed_as_the_kernel_lists_them(text: str, listed: str) -> None:
    assert show(read(text)) == listed


@pytest.mark.parametrize(
    ("text", "cpus", "head"),
    [("r f", 1, "r10:"), ("r f", 8, "r16:"), ("r3 f", 8, "r3:"), ("p f", 8, "p:")],
)
def test_the_kernel_lists_how_many_calls_a_return_probe_watches(
    text: str, cpus: int, head: str
) -> None:
    assert show(read(text), cpus=cpus).startswith(f"{head}kprobes/")


@settings(max_examples=40)
@given(definitions())
def test_a_listing_reads_back_as_the_same_definition(text: str) -> None:
    found = read(text)

    again = read(show(found))

    assert plain(again) == plain(found)
    assert show(again) == show(found)


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("f vfs_read", "f:fprobes/vfs_read__entry vfs_read"),
        ("f vfs_read%return", "f:fprobes/vfs_read__exit vfs_read%return"),
        ("f:a vfs_read $retval", "f:fprobes/a vfs_read%return arg1=$retval"),
        ("f:g/ ext4:ext4_sync", "f:g/ext4_sync__entry ext4:ext4_sync"),
        ("t sched_switch prev", "t:tracepoints/sched_switch sched_switch prev=prev"),
        ("t:a/b 9p_client_req", "t:a/b 9p_client_req"),
        ("t 9p_client_req", "t:tracepoints/_9p_client_req 9p_client_req"),
    ],
)
def test_events_of_functions_and_tracepoints_have_names_and_groups_of_their_own(
    text: str, listed: str
) -> None:
    assert show(read(text), cpus=2) == listed
    assert show(read(listed), cpus=2) == listed


def test_a_pattern_of_tracepoints_becomes_one_definition_per_iterator() -> None:
    found = at_function(read("t sched_*"), "__traceiter_sched_switch")

    assert show(found) == "t:tracepoints/sched_switch sched_switch"


def test_a_pattern_becomes_one_definition_per_function() -> None:
    found = at_function(read("p:grp/ vfs_*+4 %di"), "vfs_read")

    assert show(found) == "p:grp/p_vfs_read_4 vfs_read+4 arg1=%di"


def test_a_named_pattern_keeps_its_name() -> None:
    assert at_function(read("p:ev vfs_*"), "vfs_read").event == "ev"


def test_a_pattern_in_a_module_stays_there() -> None:
    found = at_function(read("r ext4:ext4_*"), "ext4_sync_fs")

    assert show(found) == "r:kprobes/r_ext4_ext4_sync_fs_0 ext4:ext4_sync_fs"
