"""Lines of JSON that ``kprobe`` prints, each held against the schema that it publishes."""

import json
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, cast

# It has no types.
jsonschema: Any = import_module("jsonschema")


def parsed(data: bytes | str) -> list[dict[str, Any]]:
    """Return the lines of events, and of reboots, without the header: that is there once, first."""
    header, *lines = objects("line", data)
    assert is_header(header)
    assert not any(map(is_header, lines))
    return lines


def is_header(line: dict[str, Any]) -> bool:
    """Whether it is one, and not an event of that name."""
    return line["event"] == "header" and "function" not in line


def objects(name: str, data: bytes | str) -> list[dict[str, Any]]:
    """Return what each line has; it is valid, and has no member that the schema does not name.

    Args:
        name: of the lines' definition in the schema.
        data: that was printed.
    """
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        _validator(name).validate(line)
    return lines


@cache
def schema() -> dict[str, Any]:
    """Return what is published."""
    return json.loads((files("kprobes") / "sinks" / "events.schema.json").read_text())


@cache
def _validator(name: str) -> Any:
    own = {**schema(), "$ref": f"#/$defs/{name}"}
    return jsonschema.Draft202012Validator(_closed(own))


def _closed(value: object) -> object:
    # Readers are to ignore members that they do not know; here each must be known.
    match value:
        case dict():
            found = {k: _closed(v) for k, v in cast("dict[str, object]", value).items()}
            if found.get("type") == "object" and "properties" in found:
                found.setdefault("additionalProperties", False)
            return found
        case list():
            return list(map(_closed, cast("list[object]", value)))
        case _:
            return value
