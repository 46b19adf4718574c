"""``kprobe trace --python`` on a real kernel."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_LARGE_FILE = {"amd64": 0o100000, "arm64": 0o400000}
"""O_LARGEFILE, which the kernel adds."""
_READ = ["cat", "/proc/version", "/no/such/file", "/etc/passwd"]


def test_the_command_runs_a_file_of_handlers(tmp_path: Path, arch: str) -> None:
    script = tmp_path / "handlers.py"
    script.write_text(
        '@kernel.entry("do_sys_openat2")\n'
        "def opened(dfd, filename, how, *, regs):\n"
        '    if regs.task.comm.string() == "cat":\n'
        "        print(dfd, filename.string(), hex(how.flags))\n"
        '@kernel.kprobe("vfs_open")\n'
        "def broken(probe, regs):\n"
        "    1 / 0\n"
    )

    done = run_kprobe("trace", "--arch", arch, "--python", str(script), "--", *_READ)

    large = _LARGE_FILE[arch]
    lines = [f"-100 {path} {large:#x}" for path in _READ[1:]]
    # What cat ended with, for /no/such/file.
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == lines
    assert f"kprobe: vfs_open: pre_handler at {script}:7: ZeroDivisionError" in done.stderr
    assert done.stderr.count("ZeroDivisionError") == 1
    assert [line.split()[0] for line in done.stderr.splitlines()[-3:-1]] == ["opened", "broken"]


def test_a_file_may_have_handlers_of_returns(tmp_path: Path, arch: str) -> None:
    script = tmp_path / "handlers.py"
    script.write_text(
        '@kernel.returns("do_sys_openat2")\n'
        "def opened(retval, filename, *, regs):\n"
        '    if regs.task.comm == "cat":\n'
        "        print(filename.string(), retval)\n"
        "kernel.register_kretprobe(\n"
        '    Kretprobe(symbol_name="vfs_open", handler=lambda call, regs: None)\n'
        ")\n"
    )

    done = run_kprobe("trace", "--arch", arch, "--python", str(script), "--", *_READ)

    # What cat ended with, for /no/such/file.
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == ["/proc/version 3", "/no/such/file -2", "/etc/passwd 3"]
    counted = [line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert counted[:2] == ["opened", "<lambda>"]


def test_what_is_wrong_in_the_file_is_said_with_its_place(tmp_path: Path, arch: str) -> None:
    script = tmp_path / "handlers.py"
    script.write_text("\n@kernel.entry('do_sys_openat2')\ndef opened(fd): pass\n")

    done = run_kprobe(
        "trace", "--arch", arch, "-q", "--python", str(script), "p vfs_read", "--", "true"
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kprobe: {script}:2: opened takes fd, which do_sys_openat2 has not: "
        "long int do_sys_openat2(int dfd, const char *filename, struct open_how *how)\n"
    )


def run_kprobe(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kprobe")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
