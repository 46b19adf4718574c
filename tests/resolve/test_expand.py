"""Expansion of definitions before anything is read, and the listing of the result."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from tests.build.typed import resolved


def _listed(text: str, *, is_typed: bool = True) -> str:
    return show(resolved(text, is_typed=is_typed).definition).partition(" ")[2]


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("$arg*", "file=file buf=buf count=count mode=mode c=c"),
        ("x=%di $arg* %si", "x=%di file=file buf=buf count=count mode=mode c=c arg7=%si"),
        ("$arg1", "file=file"),
        ("$arg3:x32 $arg1", "count=count:x32 file=file"),
        ("$arg2:string", "buf=buf:string"),
        ("a=$arg1 b=$arg9", "a=$arg1 b=$arg9"),
        ("file count:u8", "file=file count=count:u8"),
        ("a=$arg1:%pd", "a=+0x0(+0x28($arg1)):string"),
        ("a=$arg1:%pD", "a=+0x0(+0x28(+0x18($arg1))):string"),
        ("%di:%pd", "arg1=+0x0(+0x28(%di)):string"),
        ("$arg1:%pD", "arg1=+0x0(+0x28(+0x18(file))):string"),
        ("%si file:%pD", "arg1=%si arg2=+0x0(+0x28(+0x18(file))):string"),
        ("a=file->f_path.dentry:%pd", "a=+0x0(+0x28(file->f_path.dentry)):string"),
    ],
)
def test_words_become_what_the_kernel_lists(text: str, listed: str) -> None:
    assert _listed(f"p vfs_read {text}") == f"vfs_read {listed}"


_DENTRY = "d_flags=file->f_path.dentry->d_flags d_iname=file->f_path.dentry->d_iname:string"
_QSTR = "hash=file->f_path.dentry->d_name.hash len=file->f_path.dentry->d_name.len"


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("*file->f_path", "mnt=file->f_path.mnt dentry=file->f_path.dentry"),
        ("p=*file->f_path", "p_mnt=file->f_path.mnt p_dentry=file->f_path.dentry"),
        ("*file->f_path.dentry", _DENTRY),
        (
            "**file->f_path.dentry x=%di",
            _DENTRY.replace(
                " d_iname",
                f" d_name_{_QSTR.replace(' ', ' d_name_')}"
                " d_name_name=file->f_path.dentry->d_name.name d_iname",
            )
            + " x=%di",
        ),
        ("*(path)%si", "mnt=(path)%si->mnt dentry=(path)%si->dentry"),
        (
            "*$current %si",
            "pid=$current->pid file=$current->file exit_state=$current->exit_state arg4=%si",
        ),
    ],
)
def test_a_whole_struct_is_its_members(text: str, listed: str) -> None:
    assert _listed(f"p vfs_read {text}") == f"vfs_read {listed}"


def test_members_have_their_types() -> None:
    fields = {each.name: each.type for each in resolved("p vfs_read *file").layout.fields}

    assert {name: fields[name] for name in ("f_mode", "high", "f_small", "f_void")} == {
        "f_mode": "u32",
        "high": "s32",
        "f_small": "s32",
        "f_void": "x64",
    }
    assert "f_path" not in fields
    assert "f_names" not in fields


def test_without_types_arguments_stay_what_they_are() -> None:
    assert _listed("p vfs_read $arg1 $arg9", is_typed=False) == "vfs_read arg1=$arg1 arg2=$arg9"
    assert _listed("p void_fn $arg1") == "void_fn arg1=$arg1"


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read %di ^$arg6", "NO_BTFARG"),
        ("p untyped x=%di ^$arg*", "NOSUP_BTFARG"),
        ("p void_fn ^$arg*", "NOSUP_BTFARG"),
        ("p vfs_read+1 %di ^$arg*", "NOFENTRY_ARGS"),
        ("p wordy ^$arg*", "ARGS_2LONG"),
        ("p vfs_read file=%di ^$arg*", "USED_ARG_NAME"),
        ("p vfs_read $arg1 ^$arg1", "USED_ARG_NAME"),
        ("p vfs_read $arg* ^count", "USED_ARG_NAME"),
        ("p vfs_read *(^nosuch)%di", "NO_PTR_STRCT"),
        ("p vfs_read *file->f_path ^*file->f_path", "USED_ARG_NAME"),
        ("p vfs_read *file->f_bits.^none", "NO_BTF_FIELD"),
    ],
)
def test_the_caret_marks_the_word_that_cannot_be_expanded(marked: str, code: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))


def test_expanded_arguments_count_towards_their_limit() -> None:
    words = " ".join(f"a{n}=%di" for n in range(124))

    assert len(resolved(f"p vfs_read {words[: words.rindex(' ')]} $arg*").layout.fields) == 128
    with pytest.raises(DefinitionError) as caught:
        resolved(f"p vfs_read {words} $arg*")
    assert (caught.value.code, caught.value.column) == ("TOO_MANY_ARGS", len("p vfs_read "))


def test_parameters_beyond_the_registers_are_on_the_stack() -> None:
    probe = resolved("p many $arg*")

    assert [field.name for field in probe.layout.fields] == [f"p{n}" for n in range(1, 9)]
    assert probe.definition.command == "p many $arg*"
