"""An apt and a dpkg-deb of shell that hand out made-up packages and write down their calls."""

from pathlib import Path

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
