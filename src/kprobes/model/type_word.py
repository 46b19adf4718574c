"""A type word of the language: ``u8``, ``b4@2/32``, ``string``, ``x16[4]``."""

from dataclasses import dataclass

STRINGS = ("string", "ustring", "symstr", "pd", "pD")
"""Kept in the record as a u32 ``data_loc``, their bytes behind the fixed part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeWord:
    """How an argument's value is fetched last, kept and printed.

    Attributes:
        base: u8..u64, s8..s64, x8..x64, char, symbol, string, ustring, symstr, pd, pD, or
            ``bits`` for ``bWIDTH@OFFSET/SIZE``.
        size: bytes of one element in the record; 4 for those in ``STRINGS``.
        count: N of ``TYPE[N]``, or None when it is no array.
        bit_width: WIDTH of ``bits``, else 0.
        bit_offset: OFFSET of ``bits``, from the container's lowest bit.
    """

    base: str
    size: int
    count: int | None = None
    bit_width: int = 0
    bit_offset: int = 0

    @property
    def is_string(self) -> bool:
        """Whether the record has a ``data_loc`` for it."""
        return self.base in STRINGS
