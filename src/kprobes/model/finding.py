"""One fact of a check-up: what was looked at, how it is, and what helps."""

from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """How a fact is."""

    OK = "ok"
    NOTE = "note"
    """It works without, but slower, or with a download."""
    MISSING = "missing"


class Finding(Struct, frozen=True, kw_only=True):
    """One fact.

    Attributes:
        subject: what was looked at, in a word or two.
        found: what is there.
        advice: what to do about it, or "".
    """

    subject: str
    verdict: Severity
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """Return a fact that is as it should be."""
    return Finding(subject=subject, verdict=Severity.OK, found=found)
