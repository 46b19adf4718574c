"""``make kvm``: the tests with guests under KVM, and a page of what came of them, to send in."""

import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from msgspec import Struct

from kprobes.transport.qemu_command import KVM, MACHINE_TYPES, Accel, MachineType, choose

TOP = Path(__file__).parent.parent
PAGE = TOP / "kvm-results.txt"
_NO_KVM = 2
_TESTS = ("-m", "guest and not matrix and not sweep", "--timeout", "600", "tests/system")
_OTHERS = {"amd64": "not arm64", "arm64": "arm64"}
"""Guests of another kind are translated: by architecture, the tests that are left."""
_SETTINGS = (
    "kvm_intel/parameters/nested",
    "kvm_intel/parameters/ept",
    "kvm_amd/parameters/nested",
    "kvm_amd/parameters/npt",
    "kvm_amd/parameters/avic",
)
_LONGEST = 160


class Result(Struct, frozen=True, kw_only=True):
    """One test.

    Attributes:
        file: that it is in, such as ``test_trace``.
        name: its own.
        outcome: ``passed``, ``failed`` or ``skipped``.
        message: why it failed or was skipped, a line; else "".
    """

    file: str
    name: str
    outcome: str
    message: str = ""


def obstacle(machine: MachineType, *, signs: Sequence[Path], device: Path = KVM) -> str:
    """Return why no guest runs under KVM here; "" where one does.

    Args:
        machine: of the guests.
        signs: files, of which one is there where KVM is what it should be.
        device: KVM's.
    """
    if not device.exists():
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened: are you in the group kvm?"
    if choose("auto", machine.native, signs=tuple(signs), device=device) is not Accel.KVM:
        names = " or ".join(str(sign) for sign in signs)
        return f"{device} opens, but there is no {names}: it does not run such guests by hardware"
    return ""


def read_results(path: Path) -> list[Result]:
    """Return the tests of a file that ``pytest --junitxml`` has written."""
    return [_result(case) for case in ET.parse(path).getroot().iter("testcase")]


def _result(case: ET.Element) -> Result:
    file, name = case.get("classname", "").split(".")[-1], case.get("name", "")
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            lines = found.get("message", "").splitlines() or [""]
            return Result(file=file, name=name, outcome=outcome, message=lines[0][:_LONGEST])
    return Result(file=file, name=name, outcome="passed")


def render(facts: Iterable[str], results: Sequence[Result]) -> str:
    """Return the page: what was tried on what, each file's tests, and what did not pass."""
    files = dict.fromkeys(result.file for result in results)
    counts = Counter((result.file, result.outcome) for result in results)
    columns = ("passed", "failed", "skipped")
    totals = Counter(result.outcome for result in results)
    rows = [(file, *(str(counts[file, each]) for each in columns)) for file in files]
    rows = [("", *columns), *rows, ("all", *(str(totals[each]) for each in columns))]
    table = [
        f"{file:36}{passed:>9}{failed:>9}{skipped:>9}" for file, passed, failed, skipped in rows
    ]
    others = [result for result in results if result.outcome != "passed"]
    told = [f"{each.outcome} {each.file}::{each.name}: {each.message}" for each in others]
    return "\n".join(["kprobes under KVM", "", *facts, "", *table, "", *told]).rstrip() + "\n"


def _facts(machine: MachineType) -> Iterator[str]:
    yield f"commit     {_output('git', '-C', str(TOP), 'rev-parse', '--short', 'HEAD')}"
    yield f"host       {platform.release()}, Python {platform.python_version()}"
    yield f"processor  {_processor()}"
    yield f"QEMU       {_output(machine.program, '--version').splitlines()[0]}"
    for path in (Path("/sys/module", name) for name in _SETTINGS):
        if path.exists():
            yield f"{path.parts[3]}  {path.name}={path.read_text().strip()}"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(words: Sequence[str]) -> int:
    """Run the tests, or say why that cannot be; return the exit code."""
    kinds = {machine.native: arch for arch, machine in MACHINE_TYPES.items()}
    arch = kinds.get(platform.machine(), "amd64")
    machine = MACHINE_TYPES[arch]
    why = obstacle(machine, signs=machine.kvm)
    if why:
        print(f"no KVM here: {why}")
        return _NO_KVM
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "junit.xml")
        command = (sys.executable, "-m", "pytest", *_TESTS, "-k", _OTHERS[arch], *words)
        status = subprocess.run((*command, f"--junitxml={report}"), cwd=TOP, check=False).returncode
        results = read_results(report) if report.exists() else []
    PAGE.write_text(render(_facts(machine), results))
    print(f"{PAGE.read_text()}\nThis page is {PAGE}: please send it to the project.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
