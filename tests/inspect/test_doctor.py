"""Report on this machine."""

from pathlib import Path

import pytest

from kprobes.inspect.doctor import check_machine
from kprobes.model.finding import Finding, Severity


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def findings() -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_machine()}


def test_a_machine_without_qemu_is_told_what_to_install() -> None:
    found = findings()["QEMU"]

    assert found.verdict is Severity.MISSING
    assert "apt-get install qemu-system-x86" in found.advice


def test_the_other_architectures_qemu_is_needed_for_its_guests_only(tmp_path: Path) -> None:
    absent = findings()["QEMU arm64"]
    program(tmp_path / "qemu-system-aarch64", "echo QEMU emulator version 9.9.9")

    assert absent.verdict is Severity.NOTE
    assert "to boot arm64 guests: apt-get install qemu-system-arm" in absent.advice
    assert findings()["QEMU arm64"].verdict is Severity.OK


def test_qemu_is_asked_for_its_version(tmp_path: Path) -> None:
    program(tmp_path / "qemu-system-x86_64", "echo QEMU emulator version 9.9.9 '(Debian)'")

    found = findings()["QEMU"]

    assert (found.verdict, found.found.split(",")[0]) == (Severity.OK, "9.9.9")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("7.2.22", Severity.NOTE),
        ("8.0.4", Severity.NOTE),
        ("8.1.0", Severity.OK),
        ("10.0", Severity.OK),
    ],
)
def test_a_qemu_that_loses_text_patches_is_named(
    tmp_path: Path, version: str, verdict: Severity
) -> None:
    program(tmp_path / "qemu-system-x86_64", f"echo QEMU emulator version {version}")

    assert findings()["QEMU"].verdict is verdict


def test_a_qemu_that_does_not_run_is_missing(tmp_path: Path) -> None:
    program(tmp_path / "qemu-system-x86_64", "exit 1")

    assert findings()["QEMU"].verdict is Severity.MISSING


def test_what_is_only_slower_or_downloaded_is_a_note() -> None:
    found = findings()

    notes = [subject for subject in ("apt", "kernel", "busybox") if found[subject].advice]
    assert notes == ["apt", "kernel", "busybox"]
    assert {found[subject].verdict for subject in notes} == {Severity.NOTE}


def test_a_busybox_that_is_a_script_is_not_static(tmp_path: Path) -> None:
    program(tmp_path / "busybox", "exit 0")

    assert "is not static" in findings()["busybox"].found


def test_a_kernel_in_the_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache" / "kprobes" / "images" / "linux-bookworm-amd64").mkdir(parents=True)

    assert findings()["kernel"].found == "in the cache: linux-bookworm-amd64"


def test_the_compiler_loads() -> None:
    assert findings()["LLVM"].verdict is Severity.OK
