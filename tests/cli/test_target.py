"""Options to a guest's description, and those that contradict each other."""

import argparse
from pathlib import Path

import pytest

from kprobes.cli import options, trace
from kprobes.cli.target import check_options, machine_options
from kprobes.errors import UsageError
from kprobes.transport.qemu_command import MachineOptions


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_target(parser)
    options.add_boot(parser)
    return parser.parse_args(words)


def test_without_options_it_is_the_usual_guest() -> None:
    assert machine_options(parse()) == MachineOptions()


def test_every_option_reaches_the_guest() -> None:
    words = "--kernel k --memory 1G --cpus 4 --append nokaslr --file /a=b --file /c=d --accel tcg"

    found = machine_options(parse(*words.split()))

    assert found == MachineOptions(
        kernel=Path("k"),
        memory_mib=1024,
        cpus=4,
        append="nokaslr",
        files={"/a": Path("b"), "/c": Path("d")},
        accel="tcg",
    )


def test_a_suite_names_the_kernel() -> None:
    assert machine_options(parse("--suite", "sid")).suite == "sid"


@pytest.mark.parametrize(
    "words",
    [
        ["--kernel", "k", "--suite", "sid"],
        ["--cpus", "1000"],
        ["--target", "localhost:1", "--cpus", "2"],
        ["--target", "localhost:1", "--append", ""],
        ["--target", "neither"],
    ],
)
def test_contradictions_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        check_options(parse(*words))


@pytest.mark.parametrize("target", ["qemu:localhost:1234", "[::1]:1234", "qemu:/run/gdb.sock"])
def test_a_target_alone_is_fine(target: str) -> None:
    check_options(parse("--target", target))


def test_what_is_not_a_target_is_told_what_is_one() -> None:
    with pytest.raises(UsageError) as caught:
        check_options(parse("--target", "nonsense"))

    assert str(caught.value) == (
        "'nonsense' is not a target: use one of qemu:HOST:PORT, qemu:/path/of.sock, pid:N, "
        "name:NAME, vng, libvirt:DOMAIN, running, host, guest, guest:SUITE:ARCH, auto"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wait"], "--wait is for a guest that others start: name it with --target"),
        (["--rearm", "--wait"], "--rearm is for a guest that others start: name it with --target"),
        (
            ["--boot", "--target", "localhost:1"],
            "--boot is for a guest that is booted; one that others start: --wait",
        ),
    ],
)
def test_who_boots_a_guest_waits_for_it_in_another_way(words: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)

    with pytest.raises(UsageError) as error:
        check_options(parser.parse_args([*words, "p vfs_read"]))

    assert str(error.value) == said
