"""Completion of a command line in a shell, by argcomplete. Only files of this machine are read.

A guest is never asked, as that would stop it: its functions are those of the kernel that was looked
at last, from the cache of symbols.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from argcomplete import finders
from argcomplete.completers import FilesCompleter

from kprobes.cli import actions, options
from kprobes.errors import DefinitionError, KprobesError
from kprobes.model.definition import ITERATOR

_KALLSYMS = Path("/proc/kallsyms")
_TEXT = b"tTwW"
_IN_KALLSYMS = rb"^\w+ [tTwW] (%b[\w.]*)"
_NO_PROBES = ("__pfx_", "__cfi_")
"""Beginnings of names that compilers give to what is before a function."""

Found = Iterator[str]


class Finder(finders.CompletionFinder):
    """What may be in place of the word at the cursor; options are known to argcomplete itself."""

    def collect_completions(
        self,
        active_parsers: list[argparse.ArgumentParser],
        parsed_args: argparse.Namespace,
        cword_prefix: str,
    ) -> list[str]:
        """Return them, also for ``-:EVENT``, an option with its value in the same word.

        Args:
            active_parsers: of the words before, as argcomplete has them.
            parsed_args: what these words mean.
            cword_prefix: the word at the cursor, up to there.
        """
        if cword_prefix.startswith("-:"):
            found = (f"-:{event}" for event in _events(parsed_args))
            return [each for each in found if each.startswith(cword_prefix)]
        return super().collect_completions(active_parsers, parsed_args, cword_prefix)


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions for the shell that has asked, and end this process."""
    at = int(os.environ["COMP_POINT"])
    if " -- " in os.environ["COMP_LINE"][:at]:
        # A guest's command: nothing of ours. The shell offers files.
        os._exit(1)
    finders.safe_actions |= {  # pyright: ignore[reportAttributeAccessIssue] - typed narrowly
        actions.DefinitionAction,
        actions.DeletionAction,
        actions.DisabledAction,
        actions.FilterAction,
        actions.TraceOptionAction,
        actions.TriggerAction,
        actions.Once,
    }
    Finder()(parser, always_complete_options="long", default_completer=Words())


class Words(FilesCompleter):
    """Values of options and arguments: those that are known, else files."""

    def __call__(self, prefix: str, **known: object) -> list[str]:
        """Return those that may begin with a prefix."""
        action, args = known["action"], known["parsed_args"]
        assert isinstance(action, argparse.Action)
        assert isinstance(args, argparse.Namespace)
        if isinstance(action, actions.TraceOptionAction):
            return [word for name in action.names for word in (name, f"no{name}")]
        find = _VALUES.get(action.dest)
        if find is None:
            return [*super().__call__(prefix)] if isinstance(action.type, type) else []
        with suppress(KprobesError, OSError):
            return [*find(prefix, args)]
        return []


def _targets(prefix: str, args: argparse.Namespace) -> Found:
    from kprobes.guest.journal import entries
    from kprobes.transport.qemu_process import own_stubs

    del prefix
    yield options.HOST
    if hasattr(args, "arch"):
        yield from (options.AUTO, options.GUEST)
    stubs = [str(path) for path in own_stubs()]
    traced = [entry.target for entry in entries(lambda _: None)]
    yield from (f"qemu:{address}" for address in dict.fromkeys([*stubs, *traced]))


def _definitions(prefix: str, args: argparse.Namespace) -> Found:
    if prefix.startswith("@"):
        yield from (f"@{path}" for path in FilesCompleter()(prefix[1:]))
        return
    # The place, the second word.
    head, blank, name = prefix.rpartition(" ")
    if blank and " " not in head:
        start = ITERATOR if head.startswith("t") else ""
        found = _functions(f"{start}{name}" if name else "", args)
        yield from (f"{head} {function.removeprefix(start)}" for function in found)


def _events(args: argparse.Namespace) -> Found:
    from kprobes.arch.registry import ARCHES
    from kprobes.lang.append import apply
    from kprobes.lang.parser import parse_statements

    registers = [name for arch in ARCHES.values() for name in arch.registers]
    with suppress(DefinitionError):
        words = [word for word in args.definitions if not word.startswith("@")]
        yield from (e.event for e in apply(parse_statements("\n".join(words), registers=registers)))


def _functions(prefix: str, args: argparse.Namespace) -> Found:
    if not prefix:
        # A hundred thousand are no help.
        return
    image = getattr(args, "image", None) or args.kernel
    if image is None:
        options.choose_target(args)
    if image is not None:
        names = _in_file(image, prefix)
    elif options.is_host(args):
        names = _in_kallsyms(prefix)
    else:
        names = _seen_last(prefix)
    yield from (name for name in names if not name.startswith(_NO_PROBES))


def _in_file(path: Path, prefix: str) -> Found:
    from kprobes.image.file import kernel_from_image, read_image

    symbols = kernel_from_image(read_image(path)).symbols
    yield from (each.name for each in symbols.glob(f"{prefix}*") if each.is_text)


def _in_kallsyms(prefix: str) -> Found:
    pattern = re.compile(_IN_KALLSYMS % re.escape(prefix.encode()), re.MULTILINE)
    yield from (name.decode() for name in pattern.findall(_KALLSYMS.read_bytes()))


def _seen_last(prefix: str) -> Found:
    from kprobes.image.cache import KernelCache, default_root

    table = KernelCache(default_root()).newest()
    if table is None:
        return
    names, start = table.blob[1:-1].split(b"\0"), prefix.encode()
    for name, letter in zip(names, table.types, strict=True):
        if letter in _TEXT and name.startswith(start):
            yield name.decode(errors="replace")


def _arches(prefix: str, args: argparse.Namespace) -> Found:
    from kprobes.transport.qemu_command import MACHINE_TYPES

    del prefix, args
    yield from MACHINE_TYPES


_VALUES: Mapping[str, Callable[[str, argparse.Namespace], Found]] = {
    "arch": _arches,
    "arm": _definitions,
    "definitions": _definitions,
    "pattern": _functions,
    "place": _functions,
    "target": _targets,
}
