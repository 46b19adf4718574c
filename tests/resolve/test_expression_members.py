"""Parameters, members, casts and per-CPU objects: what is read, in the end."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.model.definition import Operation
from kprobes.model.resolved import (
    ComputedValue,
    Constant,
    EntryValue,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    ReturnedValue,
    StackValue,
    TaskAddress,
)
from kprobes.units import Addr
from tests.build.kernel import TEXT
from tests.build.typed import resolved

DI, SI = RegisterValue(name="di"), RegisterValue(name="si")
RQ = 0x2F000


def _load(base: Operand, offset: int = 0, *, is_user: bool = False) -> Load:
    return Load(base=base, offset=offset, is_user=is_user)


def _plus(base: Operand, offset: int) -> ComputedValue:
    added = Constant(value=offset)
    return ComputedValue(operation=Operation.ADD, left=base, right=added)


def _cpu(base: Operand) -> PerCpuAddress:
    return PerCpuAddress(base=base, cpu_offset=Addr(0x1A000))


@pytest.mark.parametrize(
    ("form", "operand"),
    [
        ("file", DI),
        ("count", RegisterValue(name="dx")),
        ("buf:string", _load(SI)),
        ("buf:ustring", _load(SI, is_user=True)),
        ("file->f_mode", _load(DI, 0)),
        ("file->whole", _load(DI, 8)),
        ("file->high", _load(DI, 12)),
        ("file->f_path.dentry", _load(DI, 24)),
        ("file->f_path.dentry->d_flags", _load(_load(DI, 24))),
        ("file->f_path.dentry->d_name.len", _load(_load(DI, 24), 36)),
        ("file->f_path.dentry->d_name.name:string", _load(_load(_load(DI, 24), 40))),
        ("file->f_path.dentry->d_iname:string", _load(_load(DI, 24), 48)),
        ("file->f_path.dentry->d_iname:ustring", _load(_load(DI, 24), 48, is_user=True)),
        ("+8(file->f_path.dentry)", _load(_load(DI, 24), 8)),
        ("file->f_names:x64[4]", _load(DI, 104)),
        ("+0(file->f_names):string[2]", _load(_load(_load(DI, 104)))),
        ("$current", TaskAddress()),
        ("$current->pid", _load(TaskAddress(), 8)),
        ("$current->file->f_mode", _load(_load(TaskAddress(), 16))),
        ("(task_struct)%si->pid", _load(SI, 8)),
        ("(task_struct)$stack1->file->f_mode", _load(_load(StackValue(slot=1), 16))),
        ("(task_struct)(file->f_void)->pid", _load(_load(DI, 88), 8)),
        ("(file)((task_struct)%si->file)->f_mode", _load(_load(SI, 16))),
        ("(task_struct,se)%si->pid", _load(SI, 8 - 128)),
        ("(task_struct,se.dentry)%si->file->f_mode", _load(_load(SI, 16 - 136))),
        ("(task_struct)@jiffies->pid", _load(_load(Constant(value=TEXT + 0x8000)), 8)),
        ("(task_struct)+8(%di)->pid", _load(_load(DI, 8), 8)),
        ("this_cpu_ptr(@runqueues)", _cpu(Constant(value=RQ))),
        ("this_cpu_ptr(@runqueues+8)", _cpu(Constant(value=RQ + 8))),
        ("this_cpu_ptr(@0x40)", _cpu(Constant(value=0x40))),
        ("this_cpu_read(@runqueues)", _load(_cpu(Constant(value=RQ)))),
        ("this_cpu_ptr(file->f_void)", _cpu(_load(DI, 88))),
        ("this_cpu_read(%di):string", _load(_cpu(DI))),
        ("(task_struct)this_cpu_ptr(@runqueues)->pid", _load(_cpu(Constant(value=RQ)), 8)),
        ("file->f_names[2]", _load(DI, 104 + 16)),
        ("file->f_names[2][3]", _load(_load(DI, 104 + 16), 3)),
        ("file->f_bytes[3]", _load(DI, 136 + 3)),
        ("file->f_next[2]", _load(_load(DI, 96), 16)),
        ("file[2].f_mode", _load(DI, 320)),
        ("buf[7]", _load(SI, 7)),
        ("(file)%si->f_names[1]:string", _load(_load(SI, 104 + 8))),
        ("&file->f_mode", DI),
        ("&file->f_path.dentry", _plus(DI, 24)),
        ("&file->f_path.dentry->d_iname[2]", _plus(_load(DI, 24), 50)),
        ("+4(&file->f_names[1])", _load(_plus(DI, 112), 4)),
    ],
)
def test_every_chain_is_the_reads_it_stands_for(form: str, operand: Operand) -> None:
    (fetch,) = resolved(f"p vfs_read a={form}").fetches

    assert fetch.operand == operand


def test_elements_have_the_type_of_one() -> None:
    forms = "a=file->f_bytes[1] b=file->f_next[0][1] c=file->f_names[0] d=buf[0]"
    fields = resolved(f"p vfs_read {forms}").layout.fields

    assert [(each.name, each.type) for each in fields[-4:]] == [
        ("a", "s8"),
        ("b", "s32"),
        ("c", "x64"),
        ("d", "u8"),
    ]


@pytest.mark.parametrize(
    ("form", "operand"),
    [
        ("$retval", ReturnedValue()),
        ("file", EntryValue(base=DI)),
        ("$arg2", EntryValue(base=SI)),
        ("$arg7", EntryValue(base=StackValue(slot=1))),
        ("file->f_mode", _load(EntryValue(base=DI))),
        ("%di", DI),
    ],
)
def test_at_a_return_arguments_are_those_of_the_entry(form: str, operand: Operand) -> None:
    (fetch,) = resolved(f"r vfs_read a={form}").fetches

    assert fetch.operand == operand


@pytest.mark.parametrize(
    ("marked", "code", "hint"),
    [
        ("p vfs_read ^nosuch", "NO_BTFARG", "file buf count mode c"),
        ("p vfs_read ^comm", "NO_BTFARG", "the running task's name is $comm"),
        ("p vfs_read a=^nosuch->x", "NO_BTFARG", ""),
        ("p void_fn ^x", "NO_BTF_ENTRY", "void_fn has no parameters"),
        ("p untyped a=^x->y", "NO_BTF_ENTRY", ""),
        ("p vfs_read file->^nosuch", "NO_BTF_FIELD", "file has no member nosuch"),
        ("p vfs_read a=file->f_path.^nosuch", "NO_BTF_FIELD", "path has no member"),
        ("p vfs_read a=file->^f_names[4]", "NO_BTF_FIELD", "there are 4, from 0"),
        ("p vfs_read a=file->^f_mode[0]", "NO_BTF_FIELD", "f_mode is neither an array nor"),
        ("p vfs_read a=file->^f_void[0]", "NO_BTF_FIELD", "how long an element of f_void is"),
        ("p vfs_read a=^count[1]", "NO_PTR_STRCT", ""),
        ("p vfs_read a=^&file", "BAD_FETCH_ARG", "in no memory"),
        ("p vfs_read a=^&file->f_bits.one", "BAD_FETCH_ARG", "a bit-field has no address"),
        ("p vfs_read *^count", "NO_PTR_STRCT", "neither is nor points to a struct"),
        ("p vfs_read *(^nosuch)%di->x", "NO_PTR_STRCT", ""),
        ("p vfs_read a=file[2]->^f_mode", "NO_PTR_STRCT", ""),
        ("p vfs_read a=file->f_path.dentry->^nosuch", "NO_BTF_FIELD", ""),
        ("p vfs_read a=count->^x", "NO_PTR_STRCT", ""),
        ("p vfs_read a=file->f_mode->^x", "NO_PTR_STRCT", ""),
        ("p vfs_read a=file->f_mode.^x", "BAD_BTF_TID", ""),
        ("p vfs_read a=file->f_void->^x", "BAD_BTF_TID", ""),
        ("p vfs_read a=file->f_next->^x", "BAD_BTF_TID", ""),
        ("p vfs_read a=file->f_path->^x", "NO_PTR_STRCT", ""),
        ("p vfs_read b=%di a=+0(file->^no)", "NO_BTF_FIELD", ""),
        ("p vfs_read a=file->^", "NO_BTF_FIELD", "file has no member without a name"),
        ("p vfs_read a=file->^.x", "NO_BTF_FIELD", ""),
        ("p vfs_read a=file->^f_mode[2]", "NO_BTF_FIELD", ""),
        ("p vfs_read a=file->f_path->^", "NO_PTR_STRCT", ""),
        ("p vfs_read a=file->f_mode.^", "BAD_BTF_TID", ""),
        ("r many $retval->^", "BAD_BTF_TID", ""),
        ("p vfs_read a=(^nosuch)%di->x", "NO_PTR_STRCT", "no struct nosuch"),
        ("p vfs_read a=(task_struct)%di->^x", "NO_BTF_FIELD", ""),
        ("p vfs_read a=(task_struct,^nosuch)%di->pid", "NO_BTF_FIELD", ""),
        ("p vfs_read a=(task_struct,se.^nosuch)%di->pid", "NO_BTF_FIELD", ""),
        ("p vfs_read a=(odd_holder,^bit)%di->bit", "TYPECAST_NOT_ALIGNED", ""),
        ("p vfs_read $current->^nosuch", "NO_BTF_FIELD", ""),
        ("p vfs_read a=^count:string", "BAD_TYPE4STR", "char"),
        ("p vfs_read ^file:string", "BAD_TYPE4STR", ""),
        ("p vfs_read a=file->^f_mode:string", "BAD_TYPE4STR", ""),
        ("p vfs_read a=file->^f_bytes:string", "BAD_TYPE4STR", ""),
        ("p vfs_read a=file->^f_names:string", "BAD_TYPE4STR", ""),
        ("p vfs_read ^$arg2049", "NO_BTFARG", ""),
        ("p untyped ^$arg2049", "BAD_ARG_NUM", "2048"),
        ("p vfs_read+8 a=^file", "NOSUP_BTFARG", ""),
        ("p vfs_read+8 a=^$arg1", "NOFENTRY_ARGS", ""),
        ("p vfs_read+8 ^$arg1", "NOFENTRY_ARGS", ""),
        ("r void_fn a=^$retval", "NO_RETVAL", ""),
    ],
)
def test_the_caret_marks_where_a_chain_breaks(marked: str, code: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))
    assert hint in caught.value.hint


def test_a_kernel_without_types_says_so() -> None:
    for form in ("file", "file->f_mode", "$current->pid", "(file)%di->f_mode", "$arg1:%pd"):
        with pytest.raises(DefinitionError) as caught:
            resolved(f"p vfs_read a={form}", is_typed=False)
        assert caught.value.code == "NOSUP_BTFARG"


def test_an_entry_after_an_endbr_is_one_too() -> None:
    (fetch,) = resolved("p vfs_read+4 file", ibt=True).fetches

    assert fetch.operand == DI


def test_what_is_returned_has_a_type_where_the_function_has_one() -> None:
    (typed,) = resolved("r vfs_read $retval").layout.fields
    (string,) = resolved("r many $retval:string").fetches
    (untyped,) = resolved("r untyped $retval").layout.fields

    assert (typed.type, untyped.type) == ("u64", "x64")
    assert string.operand == _load(ReturnedValue())
