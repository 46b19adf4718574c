"""Layouts of events of which only their ``format`` files tell."""

import re

import pytest
from msgspec.structs import replace

from kprobes.formats.ftrace import parse_event
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.resolve.explain import format_text
from kprobes.ring.ftrace_layouts import event_of
from tests.build.recorded import LAYOUTS

_HEAD = "name: ev\nID: 77\nformat:\n" + "".join(
    f"\tfield:{declared};\toffset:{offset};\tsize:{size};\tsigned:{signed};\n"
    for declared, offset, size, signed in (
        ("unsigned short common_type", 0, 2, 0),
        ("unsigned char common_flags", 2, 1, 0),
        ("unsigned char common_preempt_count", 3, 1, 0),
        ("int common_pid", 4, 4, 1),
    )
)


def _event(declared: str, size: int, *, signed: int = 0, shown: str = '""') -> Field:
    line = f"\tfield:{declared};\toffset:8;\tsize:{size};\tsigned:{signed};\n"
    (layout,) = event_of(
        "sched", parse_event(f"{_HEAD}\n{line}\nprint fmt: {shown}\n"), (6, 1)
    ).layouts
    assert layout.print_fmt == shown
    assert (layout.group, layout.event, layout.event_id) == ("sched", "ev", 77)
    (field,) = layout.fields
    return field


@pytest.mark.parametrize(
    ("declared", "size", "signed", "type_", "count"),
    [
        ("pid_t pid", 4, 1, "s32", None),
        ("unsigned long addr", 8, 0, "u64", None),
        ("bool is_on", 1, 0, "u8", None),
        ("const void * where", 8, 0, "x64", None),
        ("struct task_struct *task", 8, 0, "x64", None),
        ("char comm[16]", 16, 0, "string", None),
        ("char comm[TASK_COMM_LEN]", 16, 0, "string", None),
        ("unsigned long args[6]", 48, 0, "u64", 6),
        ("u8 mac[ETH_ALEN]", 6, 0, "u8", 6),
        ("unsigned char mac[6]", 6, 0, "u8", 6),
        ("__data_loc unsigned char[] key", 4, 0, "bytes", None),
        ("__data_loc char[] name", 4, 0, "string", None),
        ("__rel_loc char[] name", 4, 0, "string", None),
        ("__data_loc u32[] words", 4, 0, "bytes", None),
        ("__data_loc cpumask_t cpus", 4, 0, "bytes", None),
        ("struct odd it", 12, 0, "bytes", None),
        ("struct odd many[3]", 36, 0, "bytes", None),
        ("char buf[]", 0, 0, "string", None),
    ],
)
def test_fields_are_typed_as_c_has_them(
    declared: str, size: int, signed: int, type_: str, count: int | None
) -> None:
    field = _event(declared, size, signed=signed)

    assert (field.type, field.count) == (type_, count)
    assert field.storage is (Storage.STRING if type_ in ("string", "bytes") else Storage.NUMBER)
    type_of_c, array = re.sub(r"\w+(\[\w*\])?$", "", declared).strip(), declared.partition("[")[2]
    assert field.declared == type_of_c + (f"[{array}" if declared.endswith("]") else "")


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.event for layout in LAYOUTS])
def test_probes_show_what_they_were_defined_to_show(layout: RecordLayout) -> None:
    form = parse_event(format_text(layout, number=5))

    (found,) = event_of("kprobes", form, (6, 1)).layouts

    assert [(f.name, f.type, f.count) for f in found.fields] == [
        (f.name, _kernel_type(f), f.count) for f in layout.fields
    ]
    assert found.print_fmt == ""


def _kernel_type(field: Field) -> str:
    # In the kernel's ring every text is a string, and what we measure a number.
    if field.storage is Storage.DURATION:
        return "u64"
    return field.type if field.storage is Storage.NUMBER and field.type != "symstr" else "string"


def test_system_calls_are_printed_as_the_kernel_prints_them() -> None:
    enter = parse_event(
        f"{_HEAD}\n\tfield:int __syscall_nr;\toffset:8;\tsize:4;\tsigned:1;\n"
        "\tfield:unsigned int fd;\toffset:16;\tsize:8;\tsigned:0;\n"
        "\tfield:size_t count;\toffset:24;\tsize:8;\tsigned:0;\n\nprint fmt: whatever\n"
    )
    exit_ = replace(enter, name="sys_exit_read")

    shown = [
        event_of("syscalls", each, (6, 1)).layouts[0].print_fmt
        for each in (replace(enter, name="sys_enter_read"), exit_, replace(enter, name="other"))
    ]

    assert shown == [
        '"sys_read(fd: %lx, count: %lx)", REC->fd, REC->count',
        '"sys_read -> 0x%lx", REC->ret',
        "whatever",
    ]


def test_newer_kernels_print_texts_of_the_user_and_0x() -> None:
    enter = parse_event(
        f"{_HEAD}\n\tfield:int __syscall_nr;\toffset:8;\tsize:4;\tsigned:1;\n"
        "\tfield:const char * path;\toffset:16;\tsize:8;\tsigned:0;\n"
        "\tfield:__data_loc char[] __path_val;\toffset:24;\tsize:4;\tsigned:0;\n\n"
        'print fmt: "path: 0x%08lx \\"%s\\"", REC->path, __get_str(__path_val)\n'
    )
    bytes_of = replace(enter, print_fmt='"(%s)", __print_dynamic_array(__path_val, 1)')

    shown = [
        event_of("syscalls", replace(each, name="sys_enter_chdir"), (7, 2)).layouts[0].print_fmt
        for each in (enter, bytes_of)
    ]

    assert shown == [
        (
            '"sys_chdir(path: %s%lx \\"%s\\")", (unsigned long)REC->path > 9 ? "0x" : "", '
            "REC->path, __get_str(__path_val)"
        ),
        '"%s", print_syscall_enter()',
    ]
