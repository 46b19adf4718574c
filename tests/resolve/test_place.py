"""Places: symbols, offsets, addresses and modules."""

import pytest

from kprobes.errors import DefinitionError, RefusedError
from kprobes.model.resolved import Load, RegisterValue
from kprobes.resolve.place import find_function
from tests.build.kernel import TEXT, make_kernel, read, symbol
from tests.build.typed import resolved


def test_a_name_that_a_module_has_too_needs_the_module() -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved("p twice")
    assert caught.value.code == "NON_UNIQ_SYMBOL"
    assert resolved("p fuse:twice").layout.ip == TEXT + 0x600
    assert resolved("p ext4:ext4_sync").layout.where == "ext4_sync+0x0/0x40 [ext4]"


def test_an_address_is_a_function_s_entry_or_an_instruction() -> None:
    assert resolved(f"p {TEXT + 0x100:#x}").function == TEXT + 0x100
    assert resolved(f"p {TEXT + 0x104:#x}", ibt=True).layout.ip == TEXT + 0x104
    assert resolved(f"p {TEXT + 0x100:#x}", ibt=True).layout.ip == TEXT + 0x104
    assert resolved(f"p {TEXT + 0x105:#x}", ibt=True).layout.where == "void_fn+0x5/0x40"


@pytest.mark.parametrize("offset", ["0", "0x0", "4"])
def test_an_offset_to_the_site_is_the_site(offset: str) -> None:
    assert resolved(f"p void_fn+{offset}", ibt=True).layout.ip == TEXT + 0x104


def test_an_offset_may_lead_into_another_function() -> None:
    assert resolved("p void_fn+0x100").layout.function == "untyped"


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p ^jiffies", "BAD_PROBE_ADDR"),
        ("p ^ext4:nosuch", "BAD_PROBE_ADDR"),
        (f"p ^{TEXT + 0x8004:#x}", "FAIL_REG_PROBE"),
        ("p ^0", "FAIL_REG_PROBE"),
        ("p ^void_fn+0x7f00", "FAIL_REG_PROBE"),
        ("p ^void_fn+0x80", "BAD_PROBE_ADDR"),
        ("r ^void_fn+1", "BAD_RETPROBE"),
    ],
)
def test_other_places_are_wrong(marked: str, code: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))


def test_an_address_that_no_function_has_now_is_refused() -> None:
    with pytest.raises(RefusedError, match="0x1234 is in no function"):
        resolved("p 0x1234")


def test_a_module_that_is_not_loaded_is_refused() -> None:
    with pytest.raises(RefusedError, match="module xfs is not loaded"):
        resolved("p xfs:anything")


def test_an_instruction_inside_a_function_has_registers_and_no_arguments() -> None:
    assert resolved("p void_fn+1 a=%di").layout.ip == TEXT + 0x101
    with pytest.raises(DefinitionError):
        resolved("p void_fn+1 a=$arg1")


def test_a_tracepoint_is_at_its_struct_and_gives_what_comes_after_data() -> None:
    probe = resolved("t opened file flags a=$arg2 mode=file->f_mode")

    assert (probe.addr, probe.function) == (TEXT + 0x8100, TEXT + 0x780)
    assert [each.field.name for each in probe.fetches] == ["file", "flags", "a", "mode"]
    operands = [each.operand for each in probe.fetches]
    assert operands[:3] == [RegisterValue(name=name) for name in ("si", "dx", "dx")]
    assert operands[3] == Load(base=RegisterValue(name="si"), offset=0, is_user=False)


def test_without_types_arguments_of_tracepoints_are_known_by_their_numbers() -> None:
    (fetch,) = resolved("t opened a=$arg1", is_typed=False).fetches

    assert fetch.operand == RegisterValue(name="si")


@pytest.mark.parametrize(
    ("marked", "code", "hint"),
    [
        ("t ^openned", "NO_TRACEPOINT", "did you mean opened"),
        ("t ^vfs_read", "NO_TRACEPOINT", ""),
        ("t opened ^__data", "NO_BTFARG", "its parameters: file flags"),
        ("t opened ^$arg3", "NO_BTFARG", "the function has 2 parameters: file flags"),
    ],
)
def test_what_a_tracepoint_is_not_is_told(marked: str, code: str, hint: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        resolved(marked.replace("^", "", 1))

    assert (caught.value.code, caught.value.column) == (code, marked.index("^"))
    assert caught.value.hint.startswith(hint)


def test_a_tracepoint_of_a_module_and_one_that_is_nowhere_are_refused() -> None:
    with pytest.raises(RefusedError, match="a tracepoint of the module fuse"):
        resolved("t fuse_opened")
    with pytest.raises(RefusedError, match="where the tracepoint nowhere is, this kernel does not"):
        resolved("t nowhere")


@pytest.mark.parametrize(
    ("text", "there", "hint"),
    [
        (
            "p sched_switch",
            "__traceiter_sched_switch",
            "sched_switch is a tracepoint, not a f",
        ),
        ("p trace_sched_switch", "__traceiter_sched_switch", "sched_switch is a tracepoint"),
        ("p _do_fork", "kernel_clone", "it is called kernel_clone in this kernel"),
        ("p kernel_clone", "_do_fork", "it is called _do_fork in this kernel"),
        ("p kernel_clone", "other", ""),
        ("p __se_sys_openat", "__arm64_sys_openat", "it is called __arm64_sys_openat in this"),
        ("p SyS_openat", "__x64_sys_openat", "it is called __x64_sys_openat in this kernel; sys_"),
        ("p sys_openat", "__x64_sys_open", "did you mean"),
    ],
)
def test_what_is_no_function_here_is_explained(text: str, there: str, hint: str) -> None:
    kernel = make_kernel([symbol(there, TEXT)])

    with pytest.raises(DefinitionError) as caught:
        find_function(read(text), kernel)

    assert caught.value.hint.startswith(hint)
    assert bool(caught.value.hint) == bool(hint)
