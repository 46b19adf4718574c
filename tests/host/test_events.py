"""The kernel's error_log to our errors."""

import errno

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, RefusedError, TargetError, TracefsError
from kprobes.host.events import filter_refusal, last_answer, refusal
from kprobes.resolve.tracefs_event import to_kprobe_event
from tests.build.typed import resolved

TEXT = "p:x vfs_read+1 a=%di"
SPELLED = to_kprobe_event(resolved(TEXT), (6, 1), X86_64)
LINE = SPELLED.line("kprobes_1_2_3", "x")
LOG = f"""\
[   10.000001] event_probe: error: Something else
  Command: e:other/one a.b
           ^
[   12.345678] trace_kprobe: error: Probe point is not an instruction boundary
  Command: {LINE}
{" " * (11 + LINE.index("vfs_read"))}^
[   99.000000] trace_kprobe: error: Invalid register name
  Command: p:theirs/y vfs_read %zz
                                ^
"""


def failed(number: int = errno.EINVAL) -> TracefsError:
    return TracefsError("kprobe_events", number, verb="write")


def test_the_entry_about_the_line_is_found_among_others() -> None:
    found = last_answer(LOG, LINE)

    assert found == ("Probe point is not an instruction boundary", LINE.index("vfs_read"))
    assert last_answer(LOG, "p:another one") is None


def test_the_caret_comes_back_to_the_definition() -> None:
    error = refusal(failed(), SPELLED, LINE, LOG)

    assert isinstance(error, DefinitionError)
    assert (error.code, error.command) == ("BAD_INSN_BNDRY", TEXT)
    assert TEXT[error.column :].startswith("vfs_read+1")
    assert LINE in error.hint


def test_words_that_we_do_not_know_are_passed_on() -> None:
    log = LOG.replace("Probe point is not an instruction boundary", "Something of the future")

    error = refusal(failed(), SPELLED, LINE, log)

    assert isinstance(error, DefinitionError)
    assert (error.code, error.text) == ("KERNEL", "Something of the future")


def test_a_refusal_without_a_word_says_so() -> None:
    error = refusal(failed(), SPELLED, LINE, "")

    assert isinstance(error, RefusedError)
    assert "without a reason" in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EPERM])
def test_what_is_not_about_the_definition_is_no_error_of_it(number: int) -> None:
    error = refusal(failed(number), SPELLED, LINE, LOG)

    assert isinstance(error, TargetError)
    assert not isinstance(error, RefusedError)


def test_a_filter_has_the_kernels_mark() -> None:
    shown = "nothing == 1\n    ^\nparse_error: Field not found\n"

    error = filter_refusal(SPELLED, "nothing == 1", shown)

    assert isinstance(error, DefinitionError)
    assert (error.text, error.command, error.column) == ("Field not found", "nothing == 1", 4)


def test_a_filter_without_a_mark_is_refused_all_the_same() -> None:
    assert isinstance(filter_refusal(SPELLED, "x", "none\n"), RefusedError)
