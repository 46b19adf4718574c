"""Guests for the tests: one that a whole session shares, and a way to boot more."""

import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from kprobes.errors import TargetError, UnreachableError
from kprobes.guest.journal import read
from kprobes.guest.upcalls import MAX_TIMEOUT_S
from kprobes.handlers.probe import Kprobe, Kretprobe
from kprobes.model.plan import Strategy
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.harmed import AGAIN_S, SETTLED_S, Scene
from tests.build.host_image import MEMORY_MIB, host_files
from tests.build.saved_guests import SavedGuests, shared_directory
from tests.build.victim import LOAD_FILES, Home, Load, named_kernel, settle, witness_of
from tests.system.backtraces import backtraces

Boot = Callable[..., Machine]
"""Boots a guest with these MachineOptions; the test's end closes it."""

LONG = pytest.mark.arches("amd64", "arm64", sweep="arm64")
"""Of a test that takes long on arm64: there it is a sweep."""
ONCE = pytest.mark.arches("amd64", "arm64", matrix="arm64")
"""Of a test of what both architectures have in common."""
STRATEGIES = {
    "amd64": (Strategy.JUMP, Strategy.BREAKPOINT),
    "arm64": (Strategy.JUMP,),
}
"""How instructions that are not an ftrace site are patched."""
SUITES = {"5.10": "bullseye", "6.1": "bookworm", "6.12": "bookworm-backports", "7.x": "sid"}
"""Kernels that Debian offers, and where."""
_NOT_ON_ARM64 = {"5.10", SUITES["5.10"], Strategy.BREAKPOINT}
_BOOT_S = 300.0
"""What a guest may take until it is up, on a machine that does much else."""
_RELEASE = re.compile(r"\d+\.(\d+|x)")
_LAST_WORDS = 4000
"""Characters of a console that a failed test shows."""
_ANSWER_S = 120
_PATIENT = "nosoftlockup rcupdate.rcu_cpu_stall_suppress=1"
"""QEMU itself is stopped for seconds in some tests, which are more by the clock of a guest that
measured its TSC on a busy machine. Whether its work goes on is what the load tells."""


def boot_or_skip(options: MachineOptions) -> Machine:
    """Boot a guest, or skip the test with the reason why none can be had here."""
    try:
        return Machine.boot(replace(options, boot_timeout_s=_BOOT_S))
    except UnreachableError as e:
        if "did not boot" in str(e) or "was not up" in str(e):
            raise
        pytest.skip(f"no guest: {e}")


# First: else a test has one name in a run of everything, and another in a run of its file.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each of the architectures that its mark ``arches`` names.

    What takes long on one of them is a sweep there: ``arches("amd64", "arm64", sweep="arm64")``;
    what is alike on both is for `make matrix` on one: ``arches("amd64", "arm64", matrix="arm64")``.
    """
    marker = metafunc.definition.get_closest_marker("arches")
    if marker is not None and "arch" in metafunc.fixturenames:
        left_out = {arch: getattr(pytest.mark, name) for name, arch in marker.kwargs.items()}
        found = [
            pytest.param(arch, marks=[left_out[arch]] if arch in left_out else [])
            for arch in marker.args
        ]
        metafunc.parametrize("arch", found, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what arm64 has not, and mark what is for `make matrix`.

    Debian's mirror has no 5.10 for arm64 any more. Breakpoints of ours do not exist there: a branch
    can replace any instruction. Emulating each kernel takes its time: where a parameter names it,
    `make test` has 6.1, and of amd64 those that a mark names: ``kernels("5.10", "7.x")``.
    """
    left_out = [item for item in items if _is_arm64(item) and _texts(item) & _NOT_ON_ARM64]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        marker = None if _is_arm64(item) else item.get_closest_marker("kernels")
        if not _kernels(item) <= {"6.1", *(marker.args if marker else ())}:
            # Before the marks that were asked for choose among the tests: hence tryfirst.
            item.add_marker(pytest.mark.matrix)


def _kernels(item: pytest.Item) -> set[str]:
    of_suites = {suite: version for version, suite in SUITES.items()}
    named = {of_suites.get(text, text) for text in _texts(item)}
    return {text for text in named if _RELEASE.fullmatch(text)}


def _is_arm64(item: pytest.Item) -> bool:
    return _parameters(item).get("arch") == "arm64"


def _texts(item: pytest.Item) -> set[str]:
    return {value for value in _parameters(item).values() if isinstance(value, str)}


def _parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


@pytest.fixture(scope="session", autouse=True)
def patient_handlers() -> Iterator[None]:
    """Have CPUs wait longer for handlers that name no time: this machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Kprobe, Kretprobe):
            defaults = kind.__init__.__kwdefaults__
            assert defaults is not None
            patch.setitem(defaults, "timeout_s", MAX_TIMEOUT_S)
        yield


@pytest.fixture(scope="session")
def saved_guests(tmp_path_factory: pytest.TempPathFactory) -> Generator[SavedGuests]:
    """Guests that all processes of a run have booted."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    with shared_directory(directory / "saved-guests") as shared:
        yield SavedGuests(shared, Machine.boot)


@pytest.fixture(scope="module", autouse=True)
def booted_once(saved_guests: SavedGuests) -> Generator[None]:
    """Have each kind of guest booted once; others go on from there."""
    # Other directories' tests, which have QEMUs of their own, are not to see it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "boot", saved_guests.boot)
        yield


@pytest.fixture(scope="session")
def arch(request: pytest.FixtureRequest) -> str:
    """The architecture of a test's guests, by Debian's name."""
    return getattr(request, "param", "amd64")


@pytest.fixture(scope="session", name="guest_of")
def _guest_of() -> Iterator[Callable[[str], Machine]]:
    # A fixture with a parameter is made anew whenever the next test has another one.
    with ExitStack() as guests:

        @cache
        def guest_of(arch: str) -> Machine:
            return guests.enter_context(boot_or_skip(MachineOptions(arch=arch)))

        yield guest_of


@pytest.fixture(scope="session")
def guest(arch: str, guest_of: Callable[[str], Machine]) -> Machine:
    """The 6.1 guest of an architecture that all tests share: leave it as it was."""
    return guest_of(arch)


@pytest.fixture
def boot(arch: str) -> Iterator[Boot]:
    """Boot guests of this test's own."""
    with ExitStack() as guests:

        def booted(**options: Any) -> Machine:
            options = {"arch": arch} | options
            return guests.enter_context(boot_or_skip(MachineOptions(**options)))

        yield booted


@pytest.fixture(scope="session", params=SUITES.values(), ids=list(SUITES))
def any_guest(request: pytest.FixtureRequest, arch: str) -> Iterator[Machine]:
    """A guest of every kernel in turn, shared by all tests of that kernel."""
    with boot_or_skip(MachineOptions(suite=request.param, arch=arch)) as machine:
        yield machine


def host_options(suite: str, *tools: str, **options: Any) -> MachineOptions:
    """Return what to boot for a guest in which ``kprobe`` itself runs, as on its user's machine."""
    try:
        files = {**host_files(*tools), **options.pop("files", {})}
    except UnreachableError as e:
        pytest.skip(f"no guest: {e}")
    wanted: dict[str, Any] = {"memory_mib": MEMORY_MIB, **options}
    return MachineOptions(suite=suite, files=files, **wanted)


@pytest.fixture
def boot_host() -> Iterator[Boot]:
    """Boot guests that carry our package: ``boot_host(suite, *tools, **options)``."""
    with ExitStack() as guests:

        def booted(*args: str, **options: Any) -> Machine:
            return guests.enter_context(boot_or_skip(host_options(*args, **options)))

        yield booted


@pytest.fixture(scope="session", params=SUITES.values(), ids=list(SUITES))
def any_host_guest(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A guest of every kernel in turn in which ``kprobe`` runs: leave it as it was."""
    with boot_or_skip(host_options(request.param)) as machine:
        yield machine


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[Scene]:
    """A guest at work for tracers that die at it; with ``well_afterwards`` each leaves it well."""
    home = Home(tmp_path_factory.mktemp("home"))
    kernel = named_kernel() if arch == "amd64" else None
    options = MachineOptions(arch=arch, files=LOAD_FILES, kernel=kernel, append=_PATIENT)
    with Machine.boot(options) as machine:
        settle(machine)
        witness = witness_of(str(machine.stub_address), home)
        load = Load(machine, rest_us=50_000)
        assert load.goes_on()
        yield Scene(machine, home, witness, load)


@pytest.fixture
def well_afterwards(scene: Scene) -> Generator[None]:
    """Look, after the test, whether the guest of ``scene`` is as before, and all its work right."""
    yield
    assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()
    assert scene.is_let_go_within(SETTLED_S)
    assert scene.allocated() == [], [each.read_text() for each in scene.home.journals]
    for journal in scene.home.journals:
        # Killed before there was a guardian, and long before there was anything to put back.
        assert read(journal).is_done
        journal.unlink()
    assert scene.load.goes_on()
    assert scene.load.mistakes() == ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skip a failure where KPROBES_NO_SKIP=1 says that nothing may be missing."""
    report = yield
    if report.failed:
        report.sections += [section for each in _guests_of(item) for section in _consoles_of(each)]
    if report.skipped and call.excinfo is not None and os.environ.get("KPROBES_NO_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {call.excinfo.value}"
    return report


def _guests_of(item: pytest.Item) -> list[Machine]:
    values: dict[str, Any] = getattr(item, "funcargs", {})
    # Some fixtures are more than a guest, and have one.
    found = (each for value in values.values() for each in (value, getattr(value, "machine", None)))
    return [each for each in found if isinstance(each, Machine)]


def _consoles_of(guest: Machine) -> list[tuple[str, str]]:
    """Return what a failed test's guest printed, and end a guest that answers no more.

    The tests that share it fail at once then, instead of waiting for it one by one.
    """
    sections = [("guest's console", guest.console_log()[-_LAST_WORDS:])]
    try:
        guest.run("true", _ANSWER_S)
    except TargetError as e:
        sections.append(("backtraces", backtraces(guest)))
        sections.append(("guest", f"ended, because it answers no more: {e}"))
        guest.close()
    return sections
