import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kprobes.errors import StateError, UnreachableError, UsageError
from kprobes.transport.debian import (
    Package,
    busybox,
    debug_package,
    images,
    is_static,
    kernel_image,
    kernel_parts,
    modules_of,
    parse_package,
)
from kprobes.transport.qemu_command import MACHINE_TYPES
from tests.build.elf import vmlinux

_APT_CACHE = """#!/bin/sh
echo "apt-cache $*" >>"{root}/calls"
for name; do :; done
cat "{root}/packages/$name" 2>/dev/null && exit
echo "E: No packages found" >&2
exit 100
"""

_APT_GET = """#!/bin/sh
echo "apt-get $*" >>"{root}/calls"
case "$*" in
*indextargets*) cat "{root}/mirrors" ;;
*update*)
    if [ -e "{root}/offline" ]; then
        echo "W: something" >&2
        echo "E: Failed to fetch http://mirror/debian  Temporary failure" >&2
        exit 100
    fi
    cp sources.list "{root}/sources.seen"
    cp apt.conf "{root}/conf.seen" ;;
*download*)
    sleep "$(cat "{root}/delay")"
    for word; do case "$word" in *=*) echo >"${{word%%=*}}.deb" ;; esac; done ;;
esac
"""

_DPKG_DEB = """#!/bin/sh
echo "dpkg-deb $*" >>"{root}/calls"
name=$(basename "$2" .deb)
[ "$1" = --fsys-tarfile ] && exec tar -c -C "{root}/contents/$name" .
cp -r "{root}/contents/$name/." "$3"
"""


class FakeApt:
    """Programs in ``bin``, to be put first into PATH."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.bin = root / "bin"
        for name in ("bin", "packages", "contents"):
            (root / name).mkdir(parents=True)
        (root / "calls").touch()
        (root / "delay").write_text("0")
        self.use_mirrors("http://mirror/debian/\n")
        programs = {"apt-cache": _APT_CACHE, "apt-get": _APT_GET, "dpkg-deb": _DPKG_DEB}
        for name, text in programs.items():
            (self.bin / name).write_text(text.format(root=root))
            (self.bin / name).chmod(0o755)

    def add(self, name: str, *, depends: str = "", files: dict[str, bytes] | None = None) -> None:
        """Offer a package."""
        stanza = f"Package: {name}\nVersion: 1.2-3\nDepends: {depends}\nSize: 2097152\n"
        (self._root / "packages" / name).write_text(stanza)
        contents = self._root / "contents" / name
        contents.mkdir()
        for path, data in (files or {}).items():
            (contents / path).parent.mkdir(parents=True, exist_ok=True)
            (contents / path).write_bytes(data)

    def use_mirrors(self, uris: str) -> None:
        """Say what the host's apt is set up with."""
        (self._root / "mirrors").write_text(uris)

    def go_offline(self) -> None:
        """Let every update fail."""
        (self._root / "offline").touch()

    def slow_down(self, seconds: float) -> None:
        """Let every download take that long."""
        (self._root / "delay").write_text(str(seconds))

    @property
    def calls(self) -> list[str]:
        """Return the command lines so far."""
        return (self._root / "calls").read_text().splitlines()

    @property
    def sources(self) -> str:
        """Return the sources.list of the last update."""
        return (self._root / "sources.seen").read_text()

    @property
    def configuration(self) -> str:
        """Return the configuration of the last update."""
        return (self._root / "conf.seen").read_text()


META = "linux-image-cloud-amd64"
REAL = "linux-image-6.1.0-9-cloud-amd64"
KERNEL_FILES = {
    "boot/vmlinuz-6.1.0-9-cloud-amd64": b"kernel",
    "lib/modules/6.1.0-9-cloud-amd64/kernel/fs/x.ko": b"module",
}
TWO_AT_ONCE = """
from kprobes.transport.debian import kernel_image
print(kernel_image(progress=print))
"""


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApt:
    keyring = tmp_path / "keyring.gpg"
    keyring.touch()
    monkeypatch.setattr("kprobes.transport.debian._KEYRINGS", (keyring,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = FakeApt(tmp_path / "apt")
    monkeypatch.setenv("PATH", f"{fake.bin}:/usr/bin:/bin")
    fake.add(META, depends=f"{REAL} (= 1.2-3)")
    fake.add(REAL, depends="kmod, linux-base (>= 4.3~) | x", files=KERNEL_FILES)
    return fake


def test_the_meta_package_leads_to_the_image(debian: FakeApt) -> None:
    kernel = kernel_image()

    assert kernel == images() / "linux-bookworm-amd64/boot/vmlinuz-6.1.0-9-cloud-amd64"
    assert kernel.read_bytes() == b"kernel"
    assert any("download" in call and f"{REAL}=1.2-3" in call for call in debian.calls)


@pytest.mark.parametrize(
    ("flavour", "meta"),
    [("rt", "linux-image-rt-arm64"), ("16k", "linux-image-arm64-16k")],
)
def test_each_flavour_has_its_package_and_its_place(
    debian: FakeApt, flavour: str, meta: str
) -> None:
    release = f"6.12.1-{flavour}"
    debian.add(meta, depends=f"linux-image-{release} (= 1.2-3)")
    debian.add(f"linux-image-{release}", files={f"boot/vmlinuz-{release}": b"other"})

    kernel = kernel_image(suite="trixie", arch="arm64", flavour=flavour)

    assert kernel == images() / f"linux-trixie-{flavour}-arm64/boot/vmlinuz-{release}"
    assert kernel.read_bytes() == b"other"


def test_the_packages_modules_are_kept(debian: FakeApt) -> None:
    del debian
    modules = modules_of(kernel_image())

    assert modules is not None
    assert (modules / "kernel/fs/x.ko").read_bytes() == b"module"
    assert modules_of(Path("/somewhere/else/bzImage")) is None


def test_a_kernel_of_sid_is_found_in_its_binary_package(debian: FakeApt) -> None:
    version = "7.2.1-cloud-amd64"
    debian.add("linux-image-" + version, depends=f"linux-binary-{version}, linux-modules-{version}")
    directory = f"usr/lib/modules/{version}"
    debian.add("linux-binary-" + version, files={f"{directory}/vmlinuz": b"k7"})
    debian.add("linux-modules-" + version, files={f"{directory}/kernel/a.ko": b"m7"})
    debian.add("linux-image-cloud-arm64", depends=f"linux-image-{version} (= 1.2-3)")

    found = kernel_parts(_finder(debian), "linux-image-cloud-arm64")
    kernel = kernel_image(suite="sid", arch="arm64")

    assert {package.name.split("-")[1] for package in found} == {"image", "binary", "modules"}
    assert "linux-image-cloud-arm64" not in {package.name for package in found}
    assert kernel == images() / "linux-sid-arm64" / directory / "vmlinuz"
    modules = modules_of(kernel)
    assert modules is not None
    assert (modules / "kernel/a.ko").read_bytes() == b"m7"


def _finder(debian: FakeApt) -> Callable[[str], Package]:
    def find(name: str) -> Package:
        done = subprocess.run([debian.bin / "apt-cache", name], capture_output=True, check=True)
        return parse_package(done.stdout.decode())

    return find


def test_packages_that_lead_in_circles_end(debian: FakeApt) -> None:
    for i in range(20):
        following = f"linux-image-{(i + 1) % 20}, linux-image-{(i + 7) % 20}"
        debian.add(f"linux-image-{i}", depends=following)

    assert len(kernel_parts(_finder(debian), "linux-image-0")) <= 8


DEBUG = f"{REAL}-dbg"
RELEASE = REAL.removeprefix("linux-image-")
_TOP = "usr/lib/debug"
_MODULES = f"{_TOP}/lib/modules/{RELEASE}/kernel"
DEBUG_FILES = {
    f"{_TOP}/boot/vmlinux-{RELEASE}": b"vmlinux",
    f"{_MODULES}/fs/fat.ko": b"fat",
    f"{_MODULES}/sound/snd-pcm.ko": b"pcm",
    f"{_MODULES}/sound/snd.ko": b"snd",
    f"{_TOP}/.build-id/12/34.debug": b"vmlinux",
}


def _unpacked(into: Path) -> dict[str, bytes]:
    files = (path for path in into.rglob("*") if path.is_file())
    return {str(path.relative_to(into)): path.read_bytes() for path in files}


def test_debug_information_is_that_of_the_kernel_and_of_its_modules(
    debian: FakeApt, tmp_path: Path
) -> None:
    debian.add(DEBUG, files=DEBUG_FILES)
    into, said = tmp_path / "cache" / "kprobes" / "debug" / RELEASE, list[str]()
    for modules in (["fat"], ["snd_pcm", "nosuch"]):
        with closing(debug_package(RELEASE, arch="amd64", progress=said.append)) as package:
            assert (package.suite, package.package.size) == ("bookworm", 2097152)
            package.unpack(into, modules)
        lists = package.apt.root
        assert not lists.exists()

    # What was there before is not.
    names = f"{_TOP}/boot/vmlinux-{RELEASE}", f"{_MODULES}/sound/snd-pcm.ko"
    assert _unpacked(into) == {name: DEBUG_FILES[name] for name in names}
    assert into.stat().st_mode & 0o77 == 0
    assert said == ["reading the package lists of Debian bookworm"] * 2


def test_every_suite_is_asked_and_what_each_says_is_told(debian: FakeApt) -> None:
    with pytest.raises(
        UnreachableError, match=r"has no linux-image-6\.9-amd64-dbg: bookworm: .*; sid: "
    ):
        debug_package("6.9-amd64", arch="amd64")
    assert sum("update" in call for call in debian.calls) == 6
    with pytest.raises(
        UnreachableError, match=r"has no linux-image-6\.9-amd64-dbg: trixie: [^;]*$"
    ):
        debug_package("6.9-amd64", arch="amd64", suite="trixie")


@pytest.mark.parametrize("release", ["6.9", "6.9-arm64", "6.9; rm -amd64", "6.9-mine", ""])
def test_other_kernels_are_not_asked_for(debian: FakeApt, release: str) -> None:
    with pytest.raises(UnreachableError, match="no release of a kernel of Debian's"):
        debug_package(release, arch="amd64")
    assert debian.calls == []


def test_a_package_without_the_kernel_keeps_nothing(debian: FakeApt, tmp_path: Path) -> None:
    debian.add(DEBUG, files={f"{_MODULES}/fs/fat.ko": b"fat"})
    into = tmp_path / "cache" / "kprobes" / "debug" / RELEASE
    with (
        closing(debug_package(RELEASE, arch="amd64")) as package,
        pytest.raises(UnreachableError, match="hold no"),
    ):
        package.unpack(into, ["fat"])
    assert list(into.parent.iterdir()) == []


def test_the_second_call_asks_nobody(debian: FakeApt) -> None:
    first = kernel_image()
    before = debian.calls
    debian.go_offline()

    assert kernel_image() == first
    assert debian.calls == before


def test_nothing_but_the_image_is_left_in_the_cache(debian: FakeApt) -> None:
    del debian
    kernel_image()

    assert sorted(path.name for path in images().iterdir()) == [
        ".linux-bookworm-amd64.lock",
        "linux-bookworm-amd64",
    ]


@pytest.mark.parametrize("damage", ["cut", "gone", "seal"])
def test_a_damaged_cache_is_rebuilt(debian: FakeApt, damage: str) -> None:
    kernel = kernel_image()
    match damage:
        case "cut":
            kernel.write_bytes(b"ker")
        case "gone":
            kernel.unlink()
        case _:
            (images() / "linux-bookworm-amd64/.kprobes.json").write_text('{"main": 3}')

    assert kernel_image().read_bytes() == b"kernel"
    assert sum("download" in call for call in debian.calls) == 2


def test_two_processes_at_once_download_once(debian: FakeApt) -> None:
    debian.slow_down(0.2)
    keyring = str(debian.bin.parent.parent / "keyring.gpg")
    script = (
        "from pathlib import Path\nfrom kprobes.transport import debian\n"
        f"debian._KEYRINGS = (Path({keyring!r}),)\n{TWO_AT_ONCE}"
    )
    command = [sys.executable, "-c", script]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    outputs = [process.communicate(timeout=30)[0].splitlines() for process in pair]

    assert outputs[0][-1] == outputs[1][-1] != ""
    assert sum("download" in call for call in debian.calls) == 1


def test_a_failure_keeps_nothing_and_says_what_failed(debian: FakeApt) -> None:
    debian.go_offline()

    with pytest.raises(UnreachableError, match="package lists of Debian sid: Failed to fetch"):
        kernel_image(suite="sid")

    assert not (images() / "linux-sid-amd64").exists()


def test_an_unknown_package_is_named(debian: FakeApt) -> None:
    del debian
    with pytest.raises(UnreachableError, match="find linux-image-cloud-arm64: No packages found"):
        kernel_image(arch="arm64")


def test_no_apt_here_says_so(monkeypatch: pytest.MonkeyPatch, debian: FakeApt) -> None:
    monkeypatch.setenv("PATH", str(debian.bin / "nothing"))

    with pytest.raises(UnreachableError, match="there is no apt-get here"):
        kernel_image()


def test_no_keys_says_what_to_install(monkeypatch: pytest.MonkeyPatch, debian: FakeApt) -> None:
    monkeypatch.setattr("kprobes.transport.debian._KEYRINGS", (debian.bin / "absent",))

    with pytest.raises(UnreachableError, match="install debian-archive-keyring"):
        kernel_image()


def test_a_suite_cannot_smuggle_words_into_the_sources(debian: FakeApt) -> None:
    with pytest.raises(UnreachableError, match="is not a Debian suite"):
        kernel_image(suite="sid main\ndeb http://evil")

    assert debian.calls == []


def test_a_cache_that_cannot_be_written_is_named(
    debian: FakeApt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del debian
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(StateError, match=r"cannot make .*/file/kprobes"):
        kernel_image()


def test_the_cache_is_its_users_alone_whatever_the_umask(debian: FakeApt, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        kernel = kernel_image()
        calls = debian.calls
        assert kernel_image() == kernel
    finally:
        os.umask(before)

    assert debian.calls == calls
    root = images() / "linux-bookworm-amd64"
    levels = (root, root.parent, root.parent.parent, tmp_path / "cache")
    assert [level.stat().st_mode & 0o777 for level in levels] == [0o700] * 4
    assert kernel.stat().st_mode & 0o022 == 0


def test_the_cache_of_another_user_is_refused_with_what_helps(
    debian: FakeApt, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_image()
    calls = debian.calls
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(StateError, match=r"belongs to .*, or set XDG_CACHE_HOME to"):
        kernel_image()

    assert debian.calls == calls


def test_the_hosts_mirror_serves_every_suite(debian: FakeApt) -> None:
    debian.use_mirrors("http://near/debian/\nhttp://near/debian-security/\n")

    kernel_image()

    lines = debian.sources.splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        "http://near/debian bookworm main",
        "http://near/debian-security bookworm-security main",
    ]
    assert "#clear APT::Update::Post-Invoke;" in debian.configuration


def test_a_host_that_is_not_debian_must_name_a_mirror(debian: FakeApt) -> None:
    debian.use_mirrors("http://archive.example/ubuntu/\n")

    with pytest.raises(UnreachableError, match=r"no Debian mirror: .* --mirror URL"):
        kernel_image()


@pytest.mark.parametrize("is_option", [True, False])
def test_a_mirror_that_is_named_comes_before_the_hosts(
    debian: FakeApt, monkeypatch: pytest.MonkeyPatch, is_option: bool
) -> None:
    debian.use_mirrors("http://archive.example/ubuntu/\n")
    debian.add("linux-image-cloud-arm64", files=KERNEL_FILES)
    named = "http://named/debian"
    monkeypatch.setenv("KPROBES_DEBIAN_MIRROR", "http://other" if is_option else named)

    kernel_image(suite="bookworm-backports", arch="arm64", mirror=named if is_option else "")

    (line,) = debian.sources.splitlines()
    assert line.startswith("deb [arch=arm64 signed-by=/")
    assert line.endswith(f"] {named} bookworm-backports main")


def test_what_is_no_url_of_a_mirror_is_refused(debian: FakeApt) -> None:
    del debian
    with pytest.raises(UsageError, match="not the URL of a Debian mirror: 'near by'"):
        kernel_image(mirror="near by")


def test_no_source_names_a_mirror() -> None:
    root = Path(__file__).parents[2]
    sources = [root / "Makefile", *root.glob("src/**/*.py"), *root.glob("tests/**/*.py")]
    host = b"deb." + b"debian.org"

    assert len(sources) > 100
    assert [path for path in sources if host in path.read_bytes()] == []


def test_progress_is_told_in_words(debian: FakeApt) -> None:
    del debian
    words: list[str] = []

    kernel_image(progress=words.append)

    assert words == [
        "reading the package lists of Debian bookworm",
        f"downloading {REAL} (2 MB, only the first time)",
        f"unpacking {REAL}",
    ]


def test_a_dynamic_busybox_is_not_used(debian: FakeApt) -> None:
    # Python itself needs a loader everywhere.
    (debian.bin / "busybox").symlink_to(os.path.realpath(sys.executable))
    debian.add("busybox-static", files={"bin/busybox": b"static"})

    found = busybox()

    assert found == images() / "busybox-amd64/bin/busybox"
    assert found.read_bytes() == b"static"


def test_a_script_named_busybox_is_not_used(debian: FakeApt) -> None:
    (debian.bin / "busybox").write_text("#!/bin/sh\n")
    (debian.bin / "busybox").chmod(0o755)
    debian.add("busybox-static", files={"usr/bin/busybox": b"static"})

    assert busybox().read_bytes() == b"static"


@pytest.mark.parametrize(("arch", "machine"), [("amd64", 62), ("arm64", 183)])
def test_a_static_program_is_one_of_its_own_machine(
    tmp_path: Path, arch: str, machine: int
) -> None:
    program = tmp_path / "busybox"
    program.write_bytes(vmlinux([(0x400000, b"code")], machine=machine))

    found = {other for other in MACHINE_TYPES if is_static(program, arch=other)}

    assert found == {arch}
