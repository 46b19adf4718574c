"""Debian's kernels and its static busybox, by package name, unpacked into a cache.

apt has a state of its own here: the host's suite, pins, hooks and package lists do not matter; its
mirrors and its proxy do. Nothing is installed: packages are downloaded into a directory, signatures
checked by apt. Directories of the cache are slow to fill, and then found by every later process.

A kernel's meta package (linux-image-cloud-amd64) leads to the package that holds its image:
linux-image-VERSION up to 6.x, at boot/vmlinuz-VERSION; since 7.x linux-binary-VERSION, at
usr/lib/modules/VERSION/vmlinuz, with the modules in linux-modules-VERSION.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from kprobes import directories
from kprobes.errors import FormatError, StateError, UnreachableError, UsageError
from kprobes.formats import elf
from kprobes.transport.qemu_command import DEFAULT_ARCH, MACHINE_TYPES
from kprobes.units import MIB

_VARIABLE = "KPROBES_DEBIAN_MIRROR"
_KEYRINGS = tuple(
    Path("/usr/share/keyrings", f"debian-archive-keyring.{kind}") for kind in ("gpg", "pgp")
)
_TIMEOUT_S = 900
# What follows a suite's name has no security archive of its own.
_ROLLING = re.compile(r"sid|unstable|experimental|.*-backports")

_CONFIGURATION = """\
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear APT::Architectures;
#clear APT::Default-Release;
APT::Architecture "{arch}";
APT::Architectures {{ "{arch}"; }};
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{root}/state";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
"""


class Package(Struct, frozen=True, kw_only=True):
    """What apt knows of a package.

    Attributes:
        depends: names only, the first of each group of alternatives.
        size: of the .deb, bytes.
    """

    name: str
    version: str
    depends: tuple[str, ...]
    size: int


class Apt(Struct, frozen=True, kw_only=True):
    """One suite of Debian; ``open_apt`` makes it."""

    root: Path

    def package(self, name: str) -> Package:
        """Return the newest package of this name, or raise UnreachableError."""
        command = ["apt-cache", "-c", str(self.root / "apt.conf"), "show", "--no-all-versions"]
        return parse_package(_output([*command, name], cwd=self.root, doing=f"find {name}"))

    def download(self, packages: list[Package]) -> list[Path]:
        """Fetch packages into ``root``, or raise UnreachableError."""
        names = [f"{package.name}={package.version}" for package in packages]
        command = ["apt-get", "-c", str(self.root / "apt.conf"), "-q", "download", *names]
        _output(command, cwd=self.root, doing=f"download {' '.join(names)}")
        return sorted(self.root.glob("*.deb"))


def open_apt(root: Path, *, suite: str, arch: str, mirror: str = "") -> Apt:
    """Read the package lists of a suite into ``root``, an empty directory.

    Args:
        root: where apt's state and the packages go.
        suite: such as ``bookworm``.
        arch: Debian's name.
        mirror: the URL of Debian's archive; ``""`` for $KPROBES_DEBIAN_MIRROR, else that of this
            host's own apt sources.

    Raises:
        UnreachableError: no apt, no Debian keys, no network, or no such suite.
    """
    if not re.fullmatch(r"[a-z][a-z0-9.-]*", suite):
        raise UnreachableError(f"{suite!r} is not a Debian suite")
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (root / directory).mkdir(parents=True)
    (root / "status").touch()
    options = f"[arch={arch} signed-by={_keyring()}]"
    (root / "sources.list").write_text(_sources(suite, options, mirror))
    (root / "apt.conf").write_text(_CONFIGURATION.format(root=root, arch=arch))
    command = ["apt-get", "-c", str(root / "apt.conf"), "-q", "update"]
    _output(command, cwd=root, doing=f"read the package lists of Debian {suite}")
    return Apt(root=root)


def unpack(deb: Path, into: Path) -> None:
    """Unpack a package's files, without running anything of it."""
    _output(["dpkg-deb", "-x", str(deb), str(into)], cwd=into, doing=f"unpack {deb.name}")


def parse_package(stanza: str) -> Package:
    """Turn the first paragraph of ``apt-cache show`` into facts."""
    lines = stanza.strip().split("\n\n")[0].splitlines()
    fields = dict(line.split(": ", 1) for line in lines if ": " in line and line[0] != " ")
    depends = [group.split("|")[0].split() for group in fields.get("Depends", "").split(",")]
    return Package(
        name=fields["Package"],
        version=fields["Version"],
        depends=tuple(words[0] for words in depends if words),
        size=int(fields["Size"]),
    )


def _sources(suite: str, options: str, mirror: str) -> str:
    # Security updates come from where this host's own do: a mirror need not have them.
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    uris = _output(command, cwd=Path("/"), doing="read the apt sources").split()
    found = [uri.rstrip("/") for uri in uris]
    security = [uri for uri in found if uri.endswith("/debian-security")]
    lines = [f"deb {options} {_mirror(mirror, found)} {suite} main"]
    if security and not _ROLLING.fullmatch(suite):
        lines.append(f"deb {options} {security[0]} {suite}-security main")
    return "".join(f"{line}\n" for line in lines)


def _mirror(given: str, found: list[str]) -> str:
    named = given or os.environ.get(_VARIABLE, "")
    if named and not re.fullmatch(r"[a-z+]+:[!-~]+", named):
        raise UsageError(f"not the URL of a Debian mirror: {named!r}")
    own = [uri for uri in found if uri.endswith("/debian")]
    if named or own:
        return named or own[0]
    raise UnreachableError(
        "this machine's apt has no Debian mirror: name one by --mirror URL "
        f"or {_VARIABLE}, or a kernel of your own by --kernel"
    )


def _keyring() -> Path:
    for path in _KEYRINGS:
        if path.exists():
            return path
    raise UnreachableError(
        "no keys of Debian's archive to check packages with: "
        "install debian-archive-keyring, or name a kernel of your own"
    )


def _output(command: list[str], *, cwd: Path, doing: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, timeout=_TIMEOUT_S, check=False, text=True
        )
    except FileNotFoundError as e:
        raise UnreachableError(
            f"cannot {doing}: there is no {command[0]} here (kernels come from Debian's "
            "packages); name a kernel of your own"
        ) from e
    except subprocess.TimeoutExpired as e:
        raise UnreachableError(f"cannot {doing}: no end after {_TIMEOUT_S} s") from e
    if done.returncode:
        raise UnreachableError(f"cannot {doing}: {_reason(done.stderr)}")
    return done.stdout


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    return [*errors, *lines[::-1], "no reason given"][0]


Progress = Callable[[str], None]
"""Takes a few words on what happens now, for a person who waits."""

_MANIFEST = ".kprobes.json"
_MAX_MANIFEST = 1 << 16
_OTHERS_WRITE = 0o022


def images() -> Path:
    """Return where unpacked packages are kept: ``$XDG_CACHE_HOME/kprobes/images``."""
    return directories.cache() / "images"


def cached() -> list[Path]:
    """Return the directories that were filled, by name; none where somebody else may have."""
    try:
        directories.check(images(), top=directories.cache())
        return sorted(images().glob("*"))
    except StateError:
        return []


def filled(name: str, fill: Callable[[Path], Path], *, progress: Progress) -> Path:
    """Return the main file of a cached directory, filled first when it is not there.

    Args:
        name: of the directory, below ``images()``.
        fill: puts files into an empty directory and returns the main one. Runs in one
            process at a time; nothing is kept when it raises.
        progress: told when another process is at it.

    Raises:
        StateError: the cache is somebody else's, or cannot be made.
        UnreachableError: it cannot be written; or what ``fill`` raises.
    """
    root = images() / name
    directories.make(root.parent, top=directories.cache())
    if (found := _intact(root)) is not None:
        return found
    try:
        with _locked(root, progress):
            return _intact(root) or _fill(root, fill)
    except OSError as e:
        raise UnreachableError(f"cannot write the cache {root}: {e.strerror or e}") from e


def _fill(root: Path, fill: Callable[[Path], Path]) -> Path:
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as scratch:
        fresh = Path(scratch, "image")
        fresh.mkdir(mode=0o700)
        main = fill(fresh)
        main.chmod(main.stat().st_mode & ~_OTHERS_WRITE)
        manifest = {"main": str(main.relative_to(fresh)), "sha256": _digest(main)}
        with directories.create_own(fresh / _MANIFEST) as file:
            file.write(json.dumps(manifest).encode())
        # Only a directory whose manifest does not match can be in the way: it is rebuilt.
        shutil.rmtree(root, ignore_errors=True)
        fresh.rename(root)
    return root / manifest["main"]


def _intact(root: Path) -> Path | None:
    try:
        directories.check(root, top=directories.cache())
        with directories.open_own(root / _MANIFEST) as file:
            manifest = json.loads(file.read(_MAX_MANIFEST))
        main = root / str(manifest["main"])
        return main if _digest(main) == manifest["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StateError):
        return None


def _digest(path: Path) -> str:
    with directories.open_own(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(root: Path, progress: Progress) -> Generator[None]:
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {root.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_KERNEL_PARTS = re.compile(r"linux-(image|binary|modules)-.*")
# A meta package leads to an image, which leads to a binary; more is a loop.
_MAX_PACKAGES = 8
_KERNELS = {
    "cloud": "linux-image-cloud-{arch}",
    "rt": "linux-image-rt-{arch}",
    "16k": "linux-image-{arch}-16k",
    "ordinary": "linux-image-{arch}",
}
_BUSYBOX_SUITE = "bookworm"


def _quiet(words: str) -> None:
    del words


def kernel_image(
    *,
    suite: str = "bookworm",
    arch: str = DEFAULT_ARCH,
    flavour: str = "cloud",
    mirror: str = "",
    progress: Progress = _quiet,
) -> Path:
    """Return the boot image of a Debian suite's kernel, downloaded the first time.

    The package's modules are beside it: see ``modules_of``. It stays at the version that was
    downloaded until its directory below ``image_cache.images()`` is removed.

    Args:
        suite: of Debian.
        arch: in Debian's words.
        flavour: one of Debian's, or ``ordinary``: ``cloud``, ``rt``, ``16k`` (pages of arm64).
        mirror: of the archive; "" for this machine's own.
        progress: called with what is done.

    Raises:
        UnreachableError: no apt, no network, no such suite or package.
    """
    package = _KERNELS[flavour].format(arch=arch)
    kept = f"linux-{suite}-{arch}" if flavour == "cloud" else f"linux-{suite}-{flavour}-{arch}"

    def fill(root: Path) -> Path:
        debian = _Debian(suite=suite, arch=arch, mirror=mirror)
        _fetch_into(root, package, debian, progress)
        return _only(root, "boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz", "lib/modules/*/vmlinuz")

    return filled(kept, fill, progress=progress)


_DEBUG = "./usr/lib/debug"
_SUITES = ("bookworm", "bookworm-backports", "trixie", "trixie-backports", "bullseye", "sid")


def debug_package(
    release: str, *, arch: str, suite: str = "", mirror: str = "", progress: Progress = _quiet
) -> "DebugPackage":
    """Return the package that has a kernel's debug information, of the first suite that has it.

    Args:
        release: of the kernel, as Debian names it.
        arch: in Debian's words.
        suite: of Debian; "" for all of some.
        mirror: of the archive; "" for this machine's own.
        progress: called with what is done.

    Raises:
        UnreachableError: no apt, no network, no such package.
    """
    if re.fullmatch(rf"[\w.+~-]+-{re.escape(arch)}(?:-\w+)?", release) is None:
        raise UnreachableError(f"{release!r} is no release of a kernel of Debian's")
    name, reasons = f"linux-image-{release}-dbg", list[str]()
    for each in (suite,) if suite else _SUITES:
        scratch = tempfile.TemporaryDirectory(prefix="kprobes-apt-")
        try:
            progress(f"reading the package lists of Debian {each}")
            apt = open_apt(Path(scratch.name), suite=each, arch=arch, mirror=mirror)
            found = apt.package(name)
            return DebugPackage(apt=apt, package=found, suite=each, release=release, kept=scratch)
        except UnreachableError as error:
            scratch.cleanup()
            reasons.append(f"{each}: {error}")
    raise UnreachableError(f"Debian has no {name}: {'; '.join(reasons)}")


class DebugPackage(Struct, frozen=True, kw_only=True):
    """A kernel's debug information, not downloaded yet.

    Attributes:
        suite: of Debian, which has it.
        release: of the kernel.
        kept: where apt has its lists, until this is closed.
    """

    apt: Apt
    package: Package
    suite: str
    release: str
    kept: "tempfile.TemporaryDirectory[str]"

    def unpack(self, into: Path, modules: Iterable[str]) -> None:
        """Download it and unpack the kernel's file, and those of some modules, anew.

        Args:
            into: a directory, which must not be there, or is what this made once.
            modules: as the kernel names them; those that it has not are left out.

        Raises:
            UnreachableError: it cannot be downloaded, or has no such kernel; StateError: or kept.
        """
        patterns = [name.replace("_", "[-_]") for name in modules]
        wanted = [
            f"{_DEBUG}/boot/vmlinux-{self.release}",
            *(f"{_DEBUG}/lib/modules/*/{each}.ko*" for each in patterns),
        ]
        (deb,) = self.apt.download([self.package])
        directories.make(into.parent, top=directories.cache())
        with tempfile.TemporaryDirectory(prefix=".debug-", dir=into.parent) as scratch:
            fresh = Path(scratch, "files")
            fresh.mkdir(mode=0o700)
            # Of 5.6 GB reading ends with the last that is wanted; a pattern of nothing fails.
            unpacking = ["tar", "--extract", "--wildcards", "--occurrence=1", *wanted]
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(deb)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as packed:
                subprocess.run(
                    unpacking, cwd=fresh, stdin=packed.stdout, capture_output=True, check=False
                )
            _only(fresh, f"{_DEBUG}/boot/vmlinux-*")
            shutil.rmtree(into, ignore_errors=True)
            fresh.rename(into)

    def close(self) -> None:
        """Let go of what apt has of it."""
        self.kept.cleanup()


def modules_of(kernel: Path) -> Path | None:
    """Return the modules directory that came in a package with this image, or None."""
    release = kernel.name.removeprefix("vmlinuz-")
    for path in (kernel.parent, kernel.parent.parent / "lib" / "modules" / release):
        if (path / "kernel").is_dir():
            return path
    return None


def busybox(*, arch: str = DEFAULT_ARCH, mirror: str = "", progress: Progress = _quiet) -> Path:
    """Return a static busybox: the installed one, else Debian's package from the cache.

    Args:
        arch: in Debian's words.
        mirror: of the archive; "" for this machine's own.
        progress: called with what is done.

    Raises:
        UnreachableError: none is installed, and none can be downloaded.
    """
    installed = shutil.which("busybox")
    if installed is not None and is_static(Path(installed), arch=arch):
        return Path(installed)

    def fill(root: Path) -> Path:
        debian = _Debian(suite=_BUSYBOX_SUITE, arch=arch, mirror=mirror)
        _fetch_into(root, "busybox-static", debian, progress)
        return _only(root, "bin/busybox", "usr/bin/busybox")

    return filled(f"busybox-{arch}", fill, progress=progress)


def is_static(path: Path, *, arch: str) -> bool:
    """Return whether a file is an ELF program of this machine that needs no loader."""
    try:
        program = elf.parse(path.read_bytes())
    except FormatError:
        return False
    return program.machine == MACHINE_TYPES[arch].elf and not program.needs_loader


def kernel_parts(find: Callable[[str], Package], name: str) -> list[Package]:
    """Return the parts of a kernel that a meta package leads to, or else the package itself.

    The meta package is left out: it has no files, and a mirror had all but it once.
    """
    found: dict[str, Package] = {}
    wanted = [name]
    while wanted and len(found) < _MAX_PACKAGES:
        package = find(wanted.pop())
        found[package.name] = package
        wanted += [d for d in package.depends if _KERNEL_PARTS.fullmatch(d) and d not in found]
    parts = list(found.values())
    return parts[1:] or parts


class _Debian(Struct, frozen=True, kw_only=True):
    suite: str
    arch: str
    mirror: str


def _fetch_into(root: Path, name: str, debian: _Debian, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".apt-", dir=root.parent) as scratch:
        progress(f"reading the package lists of Debian {debian.suite}")
        apt = open_apt(Path(scratch), suite=debian.suite, arch=debian.arch, mirror=debian.mirror)
        packages = kernel_parts(apt.package, name)
        size = sum(package.size for package in packages) / MIB
        progress(f"downloading {packages[-1].name} ({size:.0f} MB, only the first time)")
        debs = apt.download(packages)
        progress(f"unpacking {packages[-1].name}")
        for deb in debs:
            unpack(deb, root)


def _only(root: Path, *patterns: str) -> Path:
    found = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    if not found:
        raise UnreachableError(f"the packages hold no {patterns[0].rstrip('-*')}")
    return found[0]
