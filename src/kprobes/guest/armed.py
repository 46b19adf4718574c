"""Armed patches and probes of a guest as its journal has them, and the lines of both.

Each line is a JSON object. ``{"undos": ..., "state": n}`` has patches by column,
``{"probes": ...}`` describes all probes of some sites, and ``{"restored": ..., "sites": ...,
"state": n}`` says which patches are taken back, by their place and what they put there, and where
nothing is any more.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, cast

from msgspec import Struct
from msgspec.json import encode

from kprobes.guest.guest import InitText
from kprobes.units import Addr, Phys

FLAGS = "dyn_ftrace.flags"
"""What undos of the guest's ftrace records are for: these are not code."""


class ArmedPatch(Struct, frozen=True):
    """One write to a guest's RAM: where, what was there and what we put there.

    Attributes:
        phys, addr: its physical and its kernel address.
        old, new: bytes before and after.
        what: the probe or record it belongs to, for people.
    """

    phys: Phys
    addr: Addr
    old: bytes
    new: bytes
    what: str


class ArmedProbe(Struct, frozen=True):
    """One probe as it was armed, for whoever looks at its code.

    Attributes:
        site: the address that it is at.
        entry: of the code that a hit there leads to.
        event_id: in its records.
        definition: as text.
    """

    site: Addr
    entry: Addr
    event_id: int
    definition: str


def lasting(
    patches: Sequence[ArmedPatch], init_text: InitText | None, read: Callable[[int, int], bytes]
) -> Sequence[ArmedPatch]:
    """Return patches without those of text that boot has freed: its memory is another's.

    Args:
        patches: of a guest that stands still.
        init_text: of it, or None where it was up when it was attached to.
        read: returns bytes of its physical memory.
    """
    if init_text is None or not init_text.is_freed(read):
        return patches
    return [patch for patch in patches if not init_text.start <= patch.addr < init_text.stop]


def armed(
    lines: Iterable[dict[str, Any]],
) -> tuple[tuple[ArmedPatch, ...], tuple[ArmedProbe, ...]]:
    """Return what is armed after a journal's lines, oldest first.

    Raises:
        KeyError, TypeError, ValueError: no journal has such a line.
    """
    patches: dict[tuple[int, bytes], ArmedPatch] = {}
    probes: dict[Addr, list[ArmedProbe]] = {}
    for line in lines:
        probes |= by_site(_described(item) for item in line.get("probes", ()))
        patches |= {(patch.phys, patch.new): patch for patch in _patches_of(line.get("undos", []))}
        if "restored" in line:
            places = line["restored"]
            for phys, new in zip(places["phys"], places["new"], strict=True):
                patches.pop((int(phys), bytes.fromhex(new)), None)
            for site in line["sites"]:
                probes.pop(Addr(int(site)), None)
    return tuple(patches.values()), tuple(probe for each in probes.values() for probe in each)


def by_site(probes: Iterable[ArmedProbe]) -> dict[Addr, list[ArmedProbe]]:
    """Return probes by the address of their site, in their order."""
    found: dict[Addr, list[ArmedProbe]] = {}
    for probe in probes:
        found.setdefault(probe.site, []).append(probe)
    return found


def probes_line(probes: Iterable[ArmedProbe]) -> bytes:
    """Return the line that describes all probes of their sites."""
    found = [[each.site, each.entry, each.event_id, each.definition] for each in probes]
    return line_of({"probes": found})


def patches_line(patches: Sequence[ArmedPatch], state: int) -> bytes:
    """Return the line of patches, with how often these have changed."""
    return line_of({"undos": _columns(patches), "state": state})


def line_of(value: dict[str, Any]) -> bytes:
    """Return a value as a line."""
    try:
        return encode(value) + b"\n"
    except UnicodeEncodeError:
        # Bytes of a command line that are no text: escaped.
        return json.dumps(value).encode() + b"\n"


def _columns(patches: Sequence[ArmedPatch]) -> dict[str, list[Any]]:
    # 69,038 of them are read in a third of the time that as many objects take.
    return {
        "phys": [patch.phys for patch in patches],
        "addr": [patch.addr for patch in patches],
        "old": [patch.old.hex() for patch in patches],
        "new": [patch.new.hex() for patch in patches],
        "what": [patch.what for patch in patches],
    }


def _patches_of(found: Any) -> Iterator[ArmedPatch]:
    if isinstance(found, list):
        # Of a release that wrote an object for each.
        items = cast("list[dict[str, Any]]", found)
        rows = [[item[name] for name in ArmedPatch.__struct_fields__] for item in items]
        columns = list(zip(*rows, strict=True)) or [()] * len(ArmedPatch.__struct_fields__)
    else:
        columns = [found[name] for name in ArmedPatch.__struct_fields__]
    phys, addr, old, new, what = columns
    numbers, texts = (
        (map(int, phys), map(int, addr)),
        (map(bytes.fromhex, old), map(bytes.fromhex, new)),
    )
    return starmap(ArmedPatch, zip(*numbers, *texts, map(str, what), strict=True))


def _described(item: Sequence[Any]) -> ArmedProbe:
    site, entry, event_id, definition = item
    return ArmedProbe(
        site=Addr(int(site)),
        entry=Addr(int(entry)),
        event_id=int(event_id),
        definition=str(definition),
    )
