"""Types: what the kernel takes for an expression that has none, and what each one keeps."""

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError
from kprobes.model.resolved import FieldFetch, Storage
from kprobes.resolve.resolve import resolve
from tests.build.kernel import read
from tests.build.typed import KERNEL, resolved


def _fetch(form: str) -> FieldFetch:
    (fetch,) = resolved(f"p vfs_read a={form}").fetches
    return fetch


@pytest.mark.parametrize(
    ("form", "type_"),
    [
        ("file", "x64"),
        ("count", "u64"),
        ("mode", "s32"),
        ("c", "s8"),
        ("file->f_mode", "u32"),
        ("file->high", "s32"),
        ("file->f_path", "x64"),
        ("file->f_path.dentry", "x64"),
        ("file->f_path.dentry->d_iname", "x64"),
        ("file->f_enum", "s32"),
        ("file->f_small", "s32"),
        ("file->f_big", "s64"),
        ("file->f_wide", "u64"),
        ("file->f_odd", "u64"),
        ("file->f_bits.plain", "u32"),
        ("+0(file)", "x64"),
        ("$current", "x64"),
        ("%di", "x64"),
        ("file->f_mode:s16", "s16"),
    ],
)
def test_a_type_is_inferred_as_the_kernel_does(form: str, type_: str) -> None:
    assert _fetch(form).field.type == type_


@pytest.mark.parametrize(
    ("form", "offset", "width"),
    [
        ("file->f_bits.one", 0, 1),
        ("file->f_bits.three", 1, 3),
        ("file->f_bits.byte", 0, 8),
        ("file->f_bits.plain", 0, 0),
        ("file->f_small", 0, 8),
        ("file->f_enum", 0, 0),
        ("file->f_odd", 0, 3),
        ("file->f_bits.three:u8", 0, 0),
        ("%di:b4@2/32", 2, 4),
        ("+0(%di):b9@55/64[2]", 55, 9),
        ("%di:b32@0/32", 0, 0),
    ],
)
def test_bits_are_cut_out_of_their_container(form: str, offset: int, width: int) -> None:
    fetch = _fetch(form)

    assert (fetch.bit_offset, fetch.bit_width) == (offset, width)


@pytest.mark.parametrize(
    ("form", "type_", "storage", "size", "count"),
    [
        ("%di:char", "char", Storage.NUMBER, 1, None),
        ("%di:symbol", "symbol", Storage.NUMBER, 8, None),
        ("%di:symstr", "symstr", Storage.NUMBER, 8, None),
        ("%di:b4@2/16", "u16", Storage.NUMBER, 2, None),
        ("+0(%di):x16[4]", "x16", Storage.NUMBER, 2, 4),
        ("+0(%di):char[64]", "char", Storage.NUMBER, 1, 64),
        ("+0(%di):string[3]", "string", Storage.STRING, 4, 3),
        ("+0(%di):ustring", "ustring", Storage.STRING, 4, None),
        ("$comm", "string", Storage.COMM, 0, None),
        ('\\"hi"', "string", Storage.TEXT, 0, None),
    ],
)
def test_every_type_has_its_room(
    form: str, type_: str, storage: Storage, size: int, count: int | None
) -> None:
    field = _fetch(form).field

    assert (field.type, field.storage, field.size, field.count) == (type_, storage, size, count)


def test_an_immediate_string_is_kept_with_its_field() -> None:
    assert _fetch('\\"hello"').field.text == b"hello"


def test_enumerators_come_with_an_enum_and_only_with_numbers_of_it() -> None:
    pairs = ((0, "READ"), (1, "WRITE"))

    assert _fetch("mode").field.enumerators == pairs
    assert _fetch("file->f_enum:x32").field.enumerators == pairs
    assert _fetch("mode:char").field.enumerators == ()
    assert _fetch("count").field.enumerators == ()


@pytest.mark.parametrize(("enum", "count"), [("mode", 2), ("nosuch", 0), ("", 0)])
def test_variables_of_an_enum_have_its_enumerators(enum: str, count: int) -> None:
    definition = read("p vfs_read m=%cx:u32")
    (arg,) = definition.args
    found = resolve(
        replace(definition, args=(replace(arg, enum=enum),)),
        KERNEL,
        X86_64,
        event_id=1,
        locate=lambda function: function.addr,
    )

    assert len(found.fetches[0].field.enumerators) == count


def test_all_fields_together_have_a_limit() -> None:
    words = " ".join(f"a{n}=+0(%di):x64[64]" for n in range(6))
    marked = f"p vfs_read {words} b=^file"

    assert resolved(f"p vfs_read {words}").layout.fields
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", ""))
    assert (caught.value.code, caught.value.column) == ("EVENT_TOO_BIG", marked.index("^"))
