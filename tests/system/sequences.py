"""Random sequences of writes to a kernel's event files, and what the kernel of a guest answers.

One write is one operation: definitions and deletions go to ``kprobe_events``, ``0`` and ``1`` to
the ``enable`` files of events and groups, filters to their ``filter`` files.
"""

import random
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from kprobes.open import GuestSession
from tests.build.words import WORDS

KPROBE_EVENTS = "kprobe_events"
GROUPS = ("kprobes", "one", "two")
WAITING = "late"
"""The group of events that wait for a module. Their filters are looked at when it is there."""
EVENTS = ("a", "b", "c")
ALWAYS = "p:base/always vfs_open"
"""Defined and enabled in every sequence, and in none of its groups."""
_STEPS = 24

_PLACES = ("vfs_read", "vfs_write", "do_sys_openat2", "vfs_getattr", "vfs_fsync")
# In amd64's words. Not $argN, whose name and type the kernels of some releases look up.
_ARGS = (
    *("", "", "x=%di", "x=%di", "x=%si", "x=%di:s32", "y=%di", "x=%di y=%si:u64"),
    *("x=%di y=%dx:u64", "x=+0(%si):string", "x=+0(%di):x8[4]", "x=$comm"),
)
_RETURN_ARGS = ("", "x=$retval:x64", "x=$retval:x64", "y=$retval:x64", "x=$retval:s32", "x=$comm")
_WRONG_PLACES = (
    *("no_such_function", "vfs_read%up", "vfs_read-1", "/vfs_read", "vfs_read+0x10000000000"),
    "9lives",
)
_WRONG_ARGS = (
    *(
        "x=%nothing",
        "x=$nothing",
        "x=+0(%di",
        "x=%di:u65",
        "9x=%di",
        "x=%di x=%si",
        "x=$retval:x64",
    ),
    *("x=", "=%di", "common_pid=%di", "x=%di:string", "x=+a(%di)", "x=$stack9999"),
)
_WRONG_NAMES = (
    *("9a", "a-b", "one/9a", "/a", "o!e/a", "one/", "one/a/b", "x" * 64, f"{'g' * 64}/a", "a b"),
    "sched/sched_switch",
)
_WRONG_HEADS = ("q:a", "p3:a", "r0:a", "r4097:a", "rx:a", "r5x:a", "e:a", ":a", "-a")
_FILTERS = (
    *("0", "0", "x > 5", "x != 0x10", "y == 3 || common_pid > 1", "common_pid > 10", " x == 1 "),
    *('comm == "cat"', 'x ~ "c*"', "x & 3 && !(y < 7)", "0 "),
)
_WRONG_FILTERS = (
    *("nothing == 1", "x ==", "(x == 1", "x == 1)", "x = 1", "x == one", 'x == "one', "x"),
    *("x == 1 y == 2", "comm == 5", "== 1", "x ~ 1", "1"),
)


class FileWrite(Struct, frozen=True):
    """One operation: a text and the file, below tracefs, that it is written to."""

    file: str
    text: str


class Answer(Struct, frozen=True):
    """What a kernel said to a write.

    Attributes:
        why: strerror(errno), or "" when the write succeeded.
        errors: text, command and column of each entry in the ``error_log``.
    """

    why: str
    errors: tuple[tuple[str, str, int], ...] = ()


class EventStates(Struct, frozen=True):
    """What the files say.

    Attributes:
        listing: of ``kprobe_events``.
        enabled: what ``enable`` says, by GROUP and by GROUP/EVENT.
        filters: what ``filter`` says, by GROUP/EVENT: "none" where there is none.
    """

    listing: tuple[str, ...]
    enabled: Mapping[str, str] = field(default_factory=dict[str, str])
    filters: Mapping[str, str] = field(default_factory=dict[str, str])


Step = tuple[FileWrite, Answer, EventStates]
"""A write, what was said to it, and how things were afterwards."""


class Draw:
    """Draws sequences in the words of an architecture: the same ones for the same number."""

    def __init__(self, seed: int, arch: str) -> None:
        self._random = random.Random(seed)
        self._words = WORDS[arch]
        # What may be there, so that most of what is changed is.
        self._names: list[tuple[str, str]] = []

    def sequence(self) -> list[FileWrite]:
        """Return the next sequence."""
        self._names = []
        kinds = (self._defined, self._deleted, self._enabled, self._filtered)
        drawn = [self._defined() for _ in range(3)]
        while len(drawn) < _STEPS:
            (kind,) = self._random.choices(kinds, (7, 4, 6, 5))
            drawn.append(kind())
        return drawn

    def _defined(self) -> FileWrite:
        count = self._random.choice((1, 1, 1, 2, 3, 4))
        lines = [self._line() for _ in range(count)]
        return FileWrite(KPROBE_EVENTS, "\n".join(lines))

    def _line(self) -> str:
        chance = self._random.random()
        if chance < 0.1:
            return self._deletion()
        if chance < 0.13:
            return self._random.choice(("# nothing", "", "  ", "p", "p:a"))
        if chance < 0.16:
            self._names.append((WAITING, "a"))
            return f"{self._random.choice('pr')}:{WAITING}/a nosuch:function x=$comm"
        return self._definition()

    def _definition(self) -> str:
        choose, is_return = self._random.choice, self._random.random() < 0.3
        head, label, place = choose(("r", "r", "r7")) if is_return else "p", "", choose(_PLACES)
        args = choose(_RETURN_ARGS if is_return else _ARGS)
        if self._random.random() < 0.85:
            group, event = self._some_name() if self._random.random() < 0.4 else self._new_name()
            self._names.append((group, event))
            label = f":{event}" if group == "kprobes" else f":{group}{choose('/.')}{event}"
        (wrong,) = self._random.choices(range(6), (70, 4, 4, 3, 2, 1))
        if wrong == 1:
            place = choose(_WRONG_PLACES)
        elif wrong == 2:
            args = choose(_WRONG_ARGS)
        elif wrong == 3:
            label = f":{choose(_WRONG_NAMES)}"
        elif wrong == 4:
            head, label = choose(_WRONG_HEADS), ""
        elif wrong == 5 and is_return:
            place = f"{place}+8"
        return " ".join(filter(None, (f"{head}{label}", place, self._words.of(args))))

    def _deleted(self) -> FileWrite:
        lines = [self._deletion() for _ in range(self._random.choice((1, 1, 1, 2)))]
        return FileWrite(KPROBE_EVENTS, "\n".join(lines))

    def _deletion(self) -> str:
        group, event = self._some_name()
        place, args = self._random.choice(_PLACES), self._words.of(self._random.choice(_ARGS))
        forms = (
            *(f"-:{event}", f"-:{group}/{event}", f"-:{group}/{event}", f"-:{group}/"),
            *(f"-:{event} {place}", f"-:{group}/{event} {place}", f"-:{event} {place} {args}"),
            *("-:nothing", f"-:nothing/{event}", f"-:{group}/nothing", "-:nothing/", "-:", "-"),
        )
        (form,) = self._random.choices(forms, (6, 6, 6, 3, 3, 3, 3, *[0.5] * 6))
        return form.strip()

    def _enabled(self) -> FileWrite:
        return FileWrite(f"{self._directory()}/enable", self._random.choice("01"))

    def _filtered(self) -> FileWrite:
        is_wrong = self._random.random() < 0.2
        text = self._random.choice(_WRONG_FILTERS if is_wrong else _FILTERS)
        directory = self._directory()
        return self._enabled() if WAITING in directory else FileWrite(f"{directory}/filter", text)

    def _directory(self) -> str:
        group, event = self._some_name()
        return f"events/{group}" if self._random.random() < 0.25 else f"events/{group}/{event}"

    def _some_name(self) -> tuple[str, str]:
        is_there = self._names and self._random.random() < 0.9
        return self._random.choice(self._names) if is_there else self._new_name()

    def _new_name(self) -> tuple[str, str]:
        return self._random.choice(GROUPS), self._random.choice(EVENTS)


_FILES = " ".join(
    f"events/{group}/enable events/{group}/*/enable events/{group}/*/filter"
    for group in ("base", *GROUPS, WAITING)
)
# After each write one grep shows all files, each line behind its file's name: a guest takes longer
# to start a program than for all else. What is not there is not opened, as the shell would say of
# it only that it cannot be made.
_HEAD = f"""
cd /sys/kernel/tracing
echo 1 > /sys/kernel/rcu_expedited
w() {{
    : > error_log
    : > /tmp/why
    if [ -e "$1" ]; then {{ echo "$2" >> "$1"; }} 2> /tmp/why
    else echo "No such file or directory" > /tmp/why; fi
    grep '' /tmp/why {KPROBE_EVENTS} error_log {_FILES} 2> /dev/null
    echo @@
}}
begin() {{
    echo '{ALWAYS}' > {KPROBE_EVENTS}
    echo 1 > events/base/enable
}}
end() {{
    for each in base {" ".join(GROUPS)} {WAITING}; do
        if [ -e events/$each/enable ]; then echo 0 > events/$each/enable; fi
    done
    : > {KPROBE_EVENTS}
    echo @@@
}}
"""
_WHY, _ERROR_LOG = "/tmp/why", "error_log"
_ERROR = re.compile(r"\[[ 0-9.]+\] [^:]+: error: (.*)\n  Command: (.*)\n( *)\^")


def script(sequences: Iterable[Sequence[FileWrite]]) -> bytes:
    """Return a script that makes the writes of sequences and shows the files after each."""
    lines = [_HEAD]
    for sequence in sequences:
        writes = (f"w {shlex.quote(each.file)} {shlex.quote(each.text)}" for each in sequence)
        lines += ["begin", *writes, "end"]
    return "\n".join([*lines, ""]).encode()


def run(
    session: GuestSession, path: str, sequences: Sequence[Sequence[FileWrite]]
) -> Iterator[list[Step]]:
    """Run the script that is at a path of the guest; yield what its kernel made of sequences."""
    output = session.run(["sh", path], timeout_s=500).output.decode(errors="replace")
    found = output.split("@@@\n")
    assert len(found) == len(sequences) + 1, output[-2000:]
    assert found[-1] == ""
    for sequence, text in zip(sequences, found[:-1], strict=True):
        shown = text.split("@@\n")
        assert len(shown) == len(sequence) + 1, text[-2000:]
        pairs = zip(sequence, shown[:-1], strict=True)
        yield [(write, *_read(each)) for write, each in pairs]


def _read(shown: str) -> tuple[Answer, EventStates]:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for line in shown.removesuffix("\n").split("\n"):
        file, _, text = line.partition(":")
        files[file].append(text)
    errors = _ERROR.findall("\n".join(files[_ERROR_LOG]))
    # The caret stands below the command, after the 11 characters of "  Command: ".
    answer = Answer(
        why="".join(files[_WHY]).rpartition(": ")[2],
        errors=tuple((text.strip(), said.rstrip(), len(at) - 11) for text, said, at in errors),
    )
    state = EventStates(
        listing=tuple(files[KPROBE_EVENTS]),
        enabled={name: "".join(text) for name, text in _of(files, "enable")},
        filters={name: "\n".join(text) for name, text in _of(files, "filter")},
    )
    return answer, state


def _of(files: Mapping[str, list[str]], name: str) -> Iterator[tuple[str, list[str]]]:
    for file, text in files.items():
        if file.startswith("events/") and file.endswith(f"/{name}"):
            yield file.removeprefix("events/").removesuffix(f"/{name}"), text
