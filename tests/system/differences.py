"""Differences between a kernel's verdict on a definition and ours: of reference/language.md."""

import re
from collections.abc import Callable

from msgspec import Struct

from kprobes.model.codes import Code
from tests.system.error_corpus import RELEASES, Case
from tests.system.judge import Verdict


class Ours(Struct, frozen=True):
    """What we say.

    Attributes:
        code: of the error, or ``""``.
        refusal: our reason for not placing what the language allows, or ``""``.
    """

    code: str
    verdict: Verdict
    refusal: str = ""


class Rule(Struct, frozen=True):
    """How a difference is recognised, and in which releases it may, and must, be."""

    is_why: Callable[[Case, Ours, Verdict], bool]
    releases: tuple[str, ...] = tuple(RELEASES)
    arches: tuple[str, ...] = ("amd64", "arm64")

    def is_of(self, kernel: "Release") -> bool:
        """Return whether a kernel must have it."""
        return kernel.number in self.releases and kernel.arch in self.arches


class Release(Struct, frozen=True):
    """A kernel: one of ``RELEASES``, and the architecture by Debian's name."""

    number: str
    arch: str


class Difference(Struct, frozen=True):
    """One row of the table; ``what`` is its first cell."""

    what: str
    rules: tuple[Rule, ...]


_TYPED = ("6.12", "7.2")
_OLD = ("6.1",)
_ARM64 = ("arm64",)
_SILENT = ("NO_PLACE", "BAD_STATEMENT", "NOT_KPROBE", "BAD_DELETION", "NO_EVENT")
_ABOUT_TYPES = ("BAD_STRING", "BAD_SYMSTRING", "BAD_BITFIELD", "EVENT_TOO_BIG", "TOO_MANY_OPS")
_PLACING = ("BAD_INSN_BNDRY", "FAIL_REG_PROBE", "NOFENTRY_ARGS", "NOSUP_BTFARG")
_PLACING_TEXTS = ("", *(Code[name].text for name in _PLACING))
_REFUSED = Code.FAIL_REG_PROBE.text
_NO_PLACE = (_REFUSED, Code.BAD_PROBE_ADDR.text)
_UNKNOWN_ENTRY = (Code.NOFENTRY_ARGS.text, Code.NOSUP_BTFARG.text)
_ADDRESS = re.compile(r"0x[0-9a-f]{16}")


def reason_for(
    case: Case, ours: Ours, theirs: Verdict, release: Release
) -> tuple[Difference, Rule] | None:
    """Return why a release's verdict on a case may differ from ours, or None."""
    for difference in DIFFERENCES:
        for rule in difference.rules:
            if rule.is_of(release) and rule.is_why(case, ours, theirs):
                return difference, rule
    return None


def _words(case: Case) -> list[str]:
    return case.lines.split("\n")[-1].split()


def _is_same_but_caret(ours: Ours, theirs: Verdict) -> bool:
    is_refused = not theirs.is_accepted and ours.verdict.text == theirs.text
    return is_refused and ours.verdict.column != theirs.column


def _is_silent(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    return ours.code in _SILENT and not theirs.is_accepted and not theirs.text


def _is_silent_type(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    return ours.code == "NEED_STRING_TYPE" and not theirs.is_accepted and not theirs.text


def _is_pattern(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del ours
    is_pattern = any(char in _words(case)[1] for char in "*?[")
    return is_pattern and theirs.text == Code.BAD_PROBE_ADDR.text


def _is_stack(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del ours
    is_ours = "$stacktrace" in case.text or "$ustack" in case.text
    return is_ours and theirs.text == Code.BAD_VAR.text


_ELEMENT_OR_STRUCT = re.compile(r"(?:\w+=)?(?:[&*]+[\w($]|[\w.>-]+\[\d+\])")


def _is_element_or_struct(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del ours
    is_ours = any(_ELEMENT_OR_STRUCT.match(word) for word in _words(case)[2:])
    refused = (Code.BAD_FETCH_ARG.text, Code.NO_BTFARG.text, Code.NO_BTF_FIELD.text)
    return is_ours and theirs.text in (*refused, Code.NOSUP_BTFARG.text)


def _is_hashed(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    lists = (ours.verdict.listing, theirs.listing)
    return len({_ADDRESS.sub("0x", text) for text in lists}) == 1 != len(set(lists))


def _is_path(case: Case, ours: Ours, theirs: Verdict) -> bool:
    is_path = re.search(":%p[dD]", case.text) is not None
    return is_path and ours.verdict.text == theirs.text != "" and "string" in theirs.command


def _is_not_placed(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    if theirs.is_accepted:
        return bool(ours.refusal) and theirs.listing == ours.verdict.listing
    return bool(ours.refusal) and theirs.text in _PLACING_TEXTS


def _is_notrace(case: Case, ours: Ours, theirs: Verdict) -> bool:
    is_notrace = any(name in case.text for name in ("__schedule", " _text"))
    return ours.verdict.is_accepted and is_notrace and theirs.text in _NO_PLACE


def _is_site(case: Case, ours: Ours, theirs: Verdict) -> bool:
    # What it refused there cannot be deleted then.
    return ours.verdict.is_accepted and not theirs.is_accepted and "vfs_read+4" in case.text


def _is_unaligned(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    return ours.code == "BAD_INSN_BNDRY" and theirs.text == _REFUSED


def _is_waiting(case: Case, ours: Ours, theirs: Verdict) -> bool:
    is_module = ":" in _words(case)[1]
    return ours.verdict.is_accepted and is_module and theirs.text in _UNKNOWN_ENTRY


def _is_nonsense(case: Case, ours: Ours, theirs: Verdict) -> bool:
    is_module = ours.code == "BAD_PROBE_ADDR" and ":" in case.text.split()[1]
    return theirs.is_accepted and (is_module or ours.code == "BAD_BITFIELD")


def _is_rewritten(case: Case, ours: Ours, theirs: Verdict) -> bool:
    is_meta = any(word.startswith("$arg") for word in _words(case))
    return is_meta and _is_same_but_caret(ours, theirs)


def _is_wild(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    # The distance of two pieces of the kernel's memory: it is another one each time.
    return theirs.column > len(theirs.command) and _is_same_but_caret(ours, theirs)


def _is_taken_for_char(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    return ours.code == "BAD_TYPE4STR" and theirs.is_accepted


def _is_untyped(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del ours, theirs
    return re.search(r"\$arg[0-9]|\$retval", case.text) is not None


def _is_older_caret(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del case
    is_type = ours.code in _ABOUT_TYPES and theirs.column < ours.verdict.column
    return is_type and _is_same_but_caret(ours, theirs)


def _is_older_order(case: Case, ours: Ours, theirs: Verdict) -> bool:
    del theirs
    is_meta = any(word.startswith("$arg") for word in _words(case))
    return is_meta and ours.code in ("BAD_VAR", "BAD_ARG_NUM")


def _is_overflow(case: Case, ours: Ours, theirs: Verdict) -> bool:
    # It takes 2**64 for 0 and reads what is before the first parameter: on arm64, no name.
    found = re.search(r"\$arg([0-9]{20,})", case.text)
    is_one = found is not None and int(found[1]) >= 1 << 64
    return is_one and ours.code == "NO_BTFARG" and theirs.text == Code.NO_ARG_BODY.text


def _is_before_params(case: Case, ours: Ours, theirs: Verdict) -> bool:
    # It reads the word before the first parameter, where no name is.
    del case
    return ours.code in ("BAD_ARG_NUM", "NO_BTFARG") and theirs.text == Code.NO_BTF_ENTRY.text


DIFFERENCES = (
    Difference("what is refused without a word", (Rule(_is_silent),)),
    Difference(
        "patterns as places; `$stacktrace`, `$ustack`, `NAME[N]`, `&NAME`, `*NAME`; "
        "arguments at `MODULE:SYMBOL`",
        (
            Rule(_is_pattern),
            Rule(_is_stack),
            Rule(_is_element_or_struct),
            Rule(_is_waiting, _TYPED),
        ),
    ),
    Difference("an address in a listing", (Rule(_is_hashed),)),
    Difference("errors in `X:%pd`", (Rule(_is_path, _TYPED),)),
    Difference(
        "where a probe may be",
        (
            Rule(_is_not_placed, _TYPED, ("amd64",)),
            Rule(_is_notrace),
            Rule(_is_site, arches=_ARM64),
            Rule(_is_unaligned, arches=_ARM64),
        ),
    ),
    Difference(
        "what means nothing",
        (
            Rule(_is_nonsense),
            Rule(_is_taken_for_char, _TYPED),
            Rule(_is_overflow, ("7.2",), _ARM64),
        ),
    ),
    Difference("some carets", (Rule(_is_wild, _TYPED), Rule(_is_rewritten, _TYPED))),
    Difference(
        "what older releases do otherwise",
        (
            Rule(_is_silent_type, _OLD),
            Rule(_is_older_caret, _OLD),
            Rule(_is_older_order, _OLD),
            Rule(_is_untyped, _OLD),
            Rule(_is_before_params, ("6.12",)),
        ),
    ),
)
OF_EVENTS = ("values that the kernel misreads",)
"""Rows that are of events, not of definitions: ``tests/system/test_events.py``."""
