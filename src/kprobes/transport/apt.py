"""Debian packages by name, through an apt whose state is its own.

The host's suite, pins, hooks and package lists do not matter here; its mirrors and its proxy
do. Nothing is installed: packages are downloaded into a directory, signatures checked by apt.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kprobes.errors import UnreachableError, UsageError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What apt knows of a package.

    Attributes:
        depends: names only, the first of each group of alternatives.
        size: of the .deb, bytes.
    """

    name: str
    version: str
    depends: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apt:
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
