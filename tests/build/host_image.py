"""Image of a guest that runs our package: Python, NumPy, Debian's tracers, and ourselves.

All comes from Debian's and Python's packages and is kept beside the kernels' images. A guest's
file system is made of it by ``MachineOptions.files``.
"""

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import kprobes
from kprobes.errors import UnreachableError
from kprobes.transport.debian import Apt, Package, filled, open_apt, unpack

MEMORY_MIB = 1024
"""What such a guest needs: its files are in its memory, while it boots twice."""

TOOLS = {"trace-cmd": "trace-cmd", "perf": "linux-perf"}
"""Programs that a guest can carry, and Debian's packages of them."""

PYTHON = "python3.11"
_SUITE = "bookworm"
_RECIPE = 6
"""Goes up with what follows, so that an image of an older recipe is not taken."""

_PACKAGES = (f"{PYTHON}-minimal", f"lib{PYTHON}-stdlib", "libstdc++6", "libdw1")
_WHEELS = ("numpy>=2.0,<2.3", "iced-x86>=1.21", "msgspec>=0.20", "rich>=13.7", "zstandard>=0.22")
# Newer wheels of NumPy refuse a CPU without cmpxchg16b, which our emulated guests lack.
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# What packages name to be installed well, or for scripts that nobody runs here.
_LEFT_OUT = re.compile(r"perl\b.*|python3(:any|-.*)?|debconf|media-types|.*-common|.*-base")
_USELESS = (
    *("usr/share", "usr/include", "etc", "usr/lib/*/perl*", "usr/lib/*/gconv"),
    *(f"usr/lib/{PYTHON}/{name}" for name in ("ensurepip", "lib2to3", "pydoc_data", "config-*")),
    *("**/numpy/**/tests", "**/numpy/f2py", "**/numpy/**/*.a", "**/numpy/**/*.pyi"),
    *("**/numpy/_core/include", "**/numpy/random/_examples"),
)
_SITE = Path("usr/lib/python3/dist-packages")
_START = f"""#!/usr/bin/{PYTHON}
import sys
from kprobes.cli.main import main
sys.exit(main())
"""


def host_files(*tools: str) -> dict[str, Path | bytes]:
    """Return the files of a guest in which ``kprobe`` runs, for ``MachineOptions.files``.

    Args:
        tools: some of ``TOOLS``.

    Raises:
        UnreachableError: packages that cannot be had.
    """
    root = _image(tuple(sorted(tools)))
    files: dict[str, Path | bytes] = {f"/{path.name}": path for path in _directories(root)}
    files[f"/usr/local/lib/{PYTHON}/dist-packages/kprobes"] = _our_package(root)
    files["/usr/local/bin/kprobe"] = _START.encode()
    files["/usr/local/bin/python3"] = root / "usr/bin" / PYTHON
    return files


def _directories(root: Path) -> list[Path]:
    return [path for path in sorted(root.iterdir()) if path.is_dir()]


def _image(tools: tuple[str, ...]) -> Path:
    def fill(root: Path) -> Path:
        _unpack_packages(root, [*_PACKAGES, *(TOOLS[tool] for tool in tools)])
        _unpack_wheels(root / _SITE)
        _slim(root)
        _compile(root, root / "usr/lib")
        return root / "usr/bin" / PYTHON

    name = "-".join(["host", str(_RECIPE), _SUITE, *tools])
    return filled(name, fill, progress=_say).parents[2]


def _say(words: str) -> None:
    sys.stderr.write(f"{words}\n")


def _unpack_packages(root: Path, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        apt = open_apt(Path(scratch), suite=_SUITE, arch="amd64")
        for deb in apt.download(_closure(apt, names)):
            unpack(deb, root)


def _closure(apt: Apt, names: Sequence[str]) -> list[Package]:
    found: dict[str, Package] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name not in found and not _LEFT_OUT.fullmatch(name):
            found[name] = apt.package(name)
            wanted += found[name].depends
    return list(found.values())


def _unpack_wheels(site: Path) -> None:
    site.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=site) as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={scratch}"]
        platforms = [f"--platform={platform}" for platform in _PLATFORMS]
        target = [f"--python-version={PYTHON.removeprefix('python')}", *platforms]
        command = [sys.executable, "-m", "pip", "download", *options, *target, *_WHEELS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnreachableError(f"no wheels for a guest: {done.stderr.strip()[-200:]}")
        for wheel in Path(scratch).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)


def _slim(root: Path) -> None:
    for pattern in _USELESS:
        for path in list(root.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@cache
def _our_package(root: Path) -> Path:
    # Compiled anew in every run of tests, for the guest takes longer over it than this machine.
    scratch = tempfile.mkdtemp(prefix="kprobes-package-")
    atexit.register(shutil.rmtree, scratch)
    package = Path(scratch, "kprobes")
    ours = Path(kprobes.__file__).parent
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("__pycache__"))
    _compile(root, package)
    return package


def _compile(root: Path, where: Path) -> None:
    # By the guest's own Python. In the guest all files are of 1970, so no times are compared.
    libraries = ":".join(str(root / where / "x86_64-linux-gnu") for where in ("lib", "usr/lib"))
    loader = [root / "lib64/ld-linux-x86-64.so.2", "--library-path", libraries]
    options = ["-q", "-f", "-j2", "--invalidation-mode=unchecked-hash"]
    python = [root / "usr/bin" / PYTHON, "-I", "-m", "compileall", *options]
    subprocess.run([*loader, *python, where], check=True)
