"""A tracing instance in ordinary files, whose rings hold some pages."""

from pathlib import Path

from kprobes.model.events import EventField, EventFormat
from tests.build.host_event import NEW_TASK, RENAME

HEADER = """\
	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:8;	size:8;	signed:1;
	field: int overwrite;	offset:8;	size:1;	signed:1;
	field: char data;	offset:16;	size:4080;	signed:0;
"""


def declaration(form: EventFormat) -> str:
    common = "".join(map(_line, form.common))
    own = "".join(map(_line, form.fields))
    return f'name: {form.name}\nID: {form.number}\nformat:\n{common}\n{own}\nprint fmt: ""\n'


def _line(field: EventField) -> str:
    array = "[16]" if field.name.endswith("comm") else ""
    return (
        f"\tfield:{field.type} {field.name}{array};\toffset:{field.offset};"
        f"\tsize:{field.size};\tsigned:{int(field.is_signed)};\n"
    )


def make_tracefs(root: Path, *rings: bytes) -> Path:
    """Return an instance whose rings hold these pages."""
    (root / "events").mkdir()
    (root / "events/header_page").write_text(HEADER)
    instance = root / "instances/ours"
    for cpu, data in enumerate(rings):
        directory = instance / "per_cpu" / f"cpu{cpu}"
        directory.mkdir(parents=True)
        (directory / "trace_pipe_raw").write_bytes(data)
        (directory / "buffer_size_kb").write_text("64\n")
        (directory / "stats").write_text("overrun: 2\ncommit overrun: 0\ndropped events: 1\n")
    for form in (NEW_TASK, RENAME):
        event = instance / "events/task" / form.name
        event.mkdir(parents=True)
        (event / "format").write_text(declaration(form))
    return instance
