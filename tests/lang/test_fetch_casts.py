import pytest

from kprobes.model.definition import (
    Argument,
    Cast,
    Deref,
    Fetch,
    Member,
    MemoryOf,
    PerCpu,
    Register,
    Span,
    Step,
)
from tests.build.definitions import Wrong, argument, caret_of


def cast(text: str) -> Cast:
    fetch = argument(f"a={text}").fetch
    assert isinstance(fetch, Member)
    assert isinstance(fetch.base, Cast)
    return fetch.base


def test_a_cast_is_a_walk_from_another_type() -> None:
    assert argument("a=(file)%di->f_path.dentry").fetch == Member(
        base=Cast(
            struct="file",
            container="",
            base=Register(name="di", span=Span(19, 22)),
            span=Span(13, 22),
        ),
        steps=(
            Step(name="f_path", is_arrow=True, span=Span(24, 30)),
            Step(name="dentry", is_arrow=False, span=Span(31, 37)),
        ),
        span=Span(13, 37),
    )


@pytest.mark.parametrize(
    ("inner", "kind"),
    [
        ("$arg1", Argument),
        ("(%di)", Register),
        ("+8(%di)", Deref),
        ("-u8(%di)", Deref),
        ("(@init_task+8)", MemoryOf),
        ("@init_task", MemoryOf),
        ("this_cpu_read(@x)", PerCpu),
        ("((file)%si->f_op)", Member),
        ("(a->b)", Member),
        ("+0((a)b->c)", Deref),
    ],
)
def test_everything_may_be_cast(inner: str, kind: type[Fetch]) -> None:
    assert isinstance(cast(f"(task_struct){inner}->pid").base, kind)


def test_a_cast_may_come_from_a_member_to_what_contains_it() -> None:
    found = cast("(tick_sched,a.sched_timer)timer->next_tick")

    assert (found.struct, found.container) == ("tick_sched", "a.sched_timer")


def test_eight_casts_nest() -> None:
    eight = "(s)(" * 7 + "(s)%di->m" + ")->m" * 7
    assert isinstance(argument(f"a={eight}").fetch, Member)

    nine = "(s)(" * 8 + "^(s)%di->m" + ")->m" * 8
    marked = f"p f a={nine}"
    assert caret_of(Wrong(marked, "TOO_MANY_NESTED")) == ("TOO_MANY_NESTED", marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read arg1=(task_struct)file^", "TYPECAST_REQ_FIELD"),
        ("p vfs_read a=(s)(%di)^", "TYPECAST_REQ_FIELD"),
        ("p vfs_read a=(s)(%di)^.x", "TYPECAST_REQ_FIELD"),
        ("p vfs_read a=(s)+8(%di).^x", "TYPECAST_REQ_FIELD"),
        ("p vfs_read a=(s)a.b^", "TYPECAST_REQ_FIELD"),
        ("p vfs_read a=(s)\\-1->x^", "TYPECAST_REQ_FIELD"),
        ("p vfs_read arg1=(task_struct)^@symbol+10->comm", "TYPECAST_SYM_OFFSET"),
        ("p vfs_read arg1=(task_struct,se^->group_node)file->comm", "TYPECAST_BAD_ARROW"),
        ("p vfs_read arg1=(task_struct,^->pid)file->comm", "NO_BTF_FIELD"),
        ("p vfs_read arg1=(task_struct,^.pid)file->comm", "NO_BTF_FIELD"),
        ("p vfs_read arg1=(task_struct,^.)file->comm", "NO_BTF_FIELD"),
        ("p vfs_read arg1=(task_struct,^)file->comm", "NO_BTF_FIELD"),
        ("p vfs_read arg1=(task_struct,a^-b)file->comm", "BAD_HYPHEN"),
        ("p vfs_read a=(^9)file->comm", "NO_PTR_STRCT"),
        ("p vfs_read a=(^)file->comm", "NO_PTR_STRCT"),
        ("p vfs_read a=(s^", "DEREF_OPEN_BRACE"),
        ("p vfs_read a=(s)^(%di->x", "DEREF_OPEN_BRACE"),
        ("p vfs_read a=(s)+8(%di->x^", "DEREF_OPEN_BRACE"),
        ("p vfs_read a=(s)^+8->x", "DEREF_NEED_BRACE"),
        ("p vfs_read a=(s)^%zz->x", "BAD_REG_NAME"),
        ("p vfs_read a=(s)(^%zz)->x", "BAD_REG_NAME"),
        ("p vfs_read a=(s)^$comm->x", "COMM_CANT_DEREF"),
        ("p 0x10 a=^(s)%di->x", "NOSUP_BTFARG"),
    ],
)
def test_the_caret_marks_the_wrong_cast(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
