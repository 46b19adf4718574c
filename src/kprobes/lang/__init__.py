"""Text to Definition and back, with the kernel's errors and carets."""

from kprobes.lang.append import Definitions, apply
from kprobes.lang.listing import at_function, show
from kprobes.lang.parser import (
    parse,
    parse_boot,
    parse_prefix,
    parse_source,
    parse_statement,
    parse_statements,
)
from kprobes.lang.types import TYPES

__all__ = [
    "TYPES",
    "Definitions",
    "apply",
    "at_function",
    "parse",
    "parse_boot",
    "parse_prefix",
    "parse_source",
    "parse_statement",
    "parse_statements",
    "show",
]
