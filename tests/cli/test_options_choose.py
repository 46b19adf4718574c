"""Choice of a command's kernel."""

import argparse
import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from kprobes.cli import options, trace
from kprobes.cli.options import choose_target, is_host, print_reason
from kprobes.cli.target import this_machine
from kprobes.errors import UsageError
from kprobes.host import obstacles
from kprobes.host.obstacles import Obstacle

IN_THE_WAY = Obstacle(subject="root", found="you are not root", advice="use sudo")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KPROBES_TARGET", raising=False)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return parser.parse_args(["p vfs_read", *words])


@pytest.fixture(params=[(), (IN_THE_WAY,)], ids=["possible", "impossible"])
def is_possible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    found: Sequence[Obstacle] = request.param
    monkeypatch.setattr(obstacles, "obstacles", lambda: list(found))
    return not found


@pytest.mark.parametrize("words", [[], ["--target", "auto"]])
def test_the_host_is_taken_where_it_can_be_probed_and_else_a_guest(
    words: list[str], *, is_possible: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(*words)

    choose_target(args)
    choose_target(args)
    print_reason(args)

    assert is_host(args) is is_possible
    assert args.target == ("host" if is_possible else None)
    said = capsys.readouterr().err
    assert said == ("" if is_possible else "kprobe: booting a guest: you are not root "
                    "(kprobe doctor says more)\n")  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "guest"],
        ["--suite", "sid"],
        ["--cpus", "1"],
        ["--python", "x.py"],
        ["--vmlinux", "vmlinux"],
        ["--module", "dummy.ko"],
        ["--strategy", "jump"],
        ["--returns", "rethook"],
        ["--exits"],
        ["-O", "stacktrace"],
        ["-O", "record-tgid"],
        ["--trigger", "stacktrace", "--all-tasks"],
        ["--trigger", "hist:keys=comm"],
        ["--trigger", "traceoff", "--follow", "--", "true"],
    ],
)
def test_what_only_guests_have_means_a_guest(
    words: list[str], *, is_possible: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    del is_possible
    args = parse(*words)

    choose_target(args)
    print_reason(args)

    assert args.target is None
    assert capsys.readouterr().err == ""


def test_triggers_that_mind_no_command_are_of_this_machine_too(*, is_possible: bool) -> None:
    args = parse("--trigger", "traceoff:1 if count > 5", "--trigger", "stop", "--tracing-off")

    choose_target(args)

    assert is_host(args) is is_possible


@pytest.mark.parametrize(("release", "is_its"), [("5.17.0-1", False), ("5.18.0-1", True)])
def test_a_kernel_whose_instances_share_their_tracing_leaves_triggers_of_it_to_a_guest(
    release: str, monkeypatch: pytest.MonkeyPatch, *, is_its: bool
) -> None:
    monkeypatch.setattr(obstacles, "obstacles", list[Obstacle])
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    args, others = parse("--trigger", "traceoff"), parse("--trigger", "enable_event:g:e")

    choose_target(args)
    choose_target(others)

    assert is_host(args) is is_its
    assert is_host(others)


def test_the_environment_has_a_say_when_nothing_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBES_TARGET", "qemu:localhost:1")
    by_environment, by_option = parse(), parse("--target", "guest")

    choose_target(by_environment)
    choose_target(by_option)

    assert (by_environment.target, by_option.target) == ("qemu:localhost:1", None)


@pytest.mark.parametrize(
    ("target", "suite", "arch"),
    [
        ("guest", None, None),
        ("guest:sid", "sid", None),
        ("guest:arm64", None, "arm64"),
        ("guest:sid:arm64", "sid", "arm64"),
        ("guest:amd64:sid", "sid", "amd64"),
    ],
)
def test_a_guest_that_is_booted_is_named_by_suite_and_architecture(
    target: str, suite: str | None, arch: str | None
) -> None:
    args = parse("-t", target)
    choose_target(args)

    assert (args.target, args.suite, args.arch) == (None, suite, arch)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-t", "guest:"], "'guest:' is not a target here: use guest, or guest:SUITE:ARCH"),
        (["-t", "guest:sid:trixie"], "guest:sid:trixie and --suite sid are two guests"),
        (["-t", "guest:sid", "--suite", "bookworm"], "guest:sid and --suite bookworm are two"),
        (["-t", "guest:arm64", "--arch", "amd64"], "guest:arm64 and --arch amd64 are two guests"),
    ],
)
def test_one_guest_is_booted(words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        choose_target(parse(*words))


def test_a_running_guest_is_what_it_is() -> None:
    args = parse("--target", "qemu:localhost:1")

    choose_target(args)

    assert args.target == "qemu:localhost:1"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--suite", "sid"], "--suite"),
        (["--strategy", "jump"], "--strategy"),
        (["--exits"], "here `p FUNCTION+OFFSET` probes each of its returns"),
        (["--call-duration"], "here `p FUNCTION` and `r FUNCTION` give the times of both"),
        (["--python", "x.py"], "kernel.events()"),
    ],
)
def test_the_host_refuses_what_only_guests_have(words: list[str], name: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_target(parse("--target", "host", *words))

    assert name in str(caught.value)


def test_nothing_is_said_to_those_who_want_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(obstacles, "obstacles", lambda: [IN_THE_WAY])
    args = parse("-q")

    choose_target(args)
    print_reason(args)

    assert capsys.readouterr().err == ""


def test_every_target_is_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    options.add_target(parser)

    text = " ".join(parser.format_help().split())

    for name in (options.AUTO, options.HOST, options.GUEST, "qemu:"):
        assert name in text


def test_the_environments_target_is_not_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROBES_TARGET", "host")
    args = argparse.Namespace(target=None, image="vmlinuz")

    choose_target(args)

    assert args.target is None


@pytest.mark.parametrize("words", [["--vmlinux", "vmlinux"], ["--module", "dummy.ko"]])
def test_files_are_of_the_host_where_it_is_asked_for_by_name(words: list[str]) -> None:
    args = parse("--target", "host", *words)

    choose_target(args)

    assert is_host(args)


@pytest.mark.parametrize("words", [["--vmlinux", "/nosuch/x"], ["--module", "/nosuch/x"]])
def test_files_of_the_host_that_are_not_there_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstacles, "check_possible", lambda: None)
    args = parse("--target", "host", *words)

    with pytest.raises(UsageError, match="/nosuch/x: there is no such file"):
        this_machine(args)
