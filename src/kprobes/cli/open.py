"""``kprobe open``: a recording as a timeline in the browser, on the page of Perfetto.

That page takes files from port 9001 of this machine alone, as its own tool, open_trace_in_ui, gives
them. Other pages, and other users of this machine, do not know the path; a page whose name was
made to mean this machine has another Host.
"""

import argparse
import errno
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from kprobes.cli import convert, options
from kprobes.cli.report import DEFAULT, add_choice
from kprobes.cli.terminal import Progress, Stop, print_message, write_text
from kprobes.errors import KprobesError, UsageError

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler

NAME = "open"
HELP = "show a recording as a timeline in the browser"
USAGE = "kprobe open [options] [FILE]"
EPILOG = """\
examples:
  kprobe open
  kprobe open reads.rec --comm cat --timeout 5m
  kprobe open reads.pftrace

The page is https://ui.perfetto.dev. Nothing leaves this machine: the page fetches the events once,
from port 9001 of 127.0.0.1, into the browser. Where there is no display, the address to open is
printed. A timeline needs Perfetto's messages: pip install 'kprobes[perfetto]'.

Exit status: 0 the page has it, 1 it was not fetched in time, the port is in use, the file is
damaged (what is whole is shown) or no recording, 2 usage, 4 the filter is wrong."""
_PAGE = "https://ui.perfetto.dev"
_ADDRESS = "127.0.0.1"
_PORT = 9001
_TIMELINE = ".pftrace"
_TIMEOUT_S = 60.0
_STALLED_S = 10.0
_POLL_S = 0.05
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help=f"the recording, - for standard input, or a {_TIMELINE} (default: {DEFAULT})",
    )
    parser.add_argument(
        "--timeout",
        type=options.duration,
        default=_TIMEOUT_S,
        metavar="TIME",
        help=f"how long the page may take to fetch it (default: {_TIMEOUT_S:.0f}s)",
    )
    add_choice(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Serve it until it was fetched; return the exit code."""
    with Stop(), TemporaryDirectory(prefix="kprobes-") as directory, _bound() as server:
        path, code = _timeline(args, Path(directory), out)
        with server.serving(path) as address:
            if not _is_opened(address):
                write_text(out, f"{address}\n")
                out.flush()
            if not server.is_fetched(args.timeout):
                raise KprobesError(f"no page has fetched it within {args.timeout:g} s: {address}")
    return code


def _timeline(args: argparse.Namespace, directory: Path, out: BinaryIO) -> tuple[Path, int]:
    # Where it is, and the exit code of having made it.
    if args.file.suffix == _TIMELINE:
        choice = argparse.ArgumentParser()
        add_choice(choice)
        if any(getattr(args, name) != value for name, value in vars(choice.parse_args([])).items()):
            raise UsageError(f"events are chosen of a recording: {args.file} is shown as it is")
        try:
            args.file.open("rb").close()
        except OSError as error:
            raise UsageError(f"cannot read {args.file}: {error.strerror}") from error
        return args.file, 0
    stem = "recording" if str(args.file) == "-" else args.file.stem
    path = directory / f"{stem}{_TIMELINE}"
    with Progress() as progress:
        progress("converting")
        code = convert.run(
            argparse.Namespace(**{**vars(args), "file": [args.file], "out": path}), out
        )
    if len(list(directory.iterdir())) > 1:
        print_message(
            "kprobe: the guest was rebooted, and its first boot is shown; "
            f"`kprobe convert FILE OUT{_TIMELINE}` has all"
        )
    return path, code


def _is_opened(address: str) -> bool:
    import webbrowser

    return any(map(os.environ.get, _DISPLAYS)) and webbrowser.open(address)


def _bound() -> "FileServer":
    try:
        return FileServer(_PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise KprobesError(f"cannot listen on {_ADDRESS}:{_PORT}: {error.strerror}") from error
        raise KprobesError(
            f"port {_PORT} is in use, and {_PAGE} takes files from no other one: end what listens "
            f"there, or open there what `kprobe convert FILE OUT{_TIMELINE}` writes"
        ) from error


class FileServer:
    """Gives one file to Perfetto's page, once."""

    def __init__(self, port: int) -> None:
        """Listen on this machine's own address; what asks is not answered yet.

        Raises:
            OSError: the port is in use.
        """
        from socketserver import ThreadingTCPServer

        self._file = Path()
        self._path = ""
        self._sending = Lock()
        self._fetched = Event()
        self._server = ThreadingTCPServer((_ADDRESS, port), self._handler, bind_and_activate=False)
        self._server.allow_reuse_address = self._server.daemon_threads = True
        try:
            self._server.server_bind()
            self._server.server_activate()
        except OSError:
            self.close()
            raise
        self._host = f"{_ADDRESS}:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        self._server.server_close()

    @contextmanager
    def serving(self, file: Path) -> Generator[str]:
        """Answer requests meanwhile; give the address of the page that makes the right one."""
        import secrets

        self._file = file
        self._path = f"/{secrets.token_urlsafe()}/{_UNUSUAL.sub('_', file.name)}"
        thread = Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        thread.start()
        try:
            yield f"{_PAGE}/#!/?url=http://{self._host}{self._path}&referrer=kprobe"
        finally:
            self._server.shutdown()
            thread.join()

    def is_fetched(self, timeout_s: float) -> bool:
        """Wait until all of the file was sent; one that is being sent at the end is waited for."""
        self._fetched.wait(timeout_s)
        with self._sending:
            return self._fetched.is_set()

    def answer(self, request: "BaseHTTPRequestHandler") -> None:
        """Send the file, or say why not."""
        if request.headers.get_all("Host") != [self._host]:
            request.send_error(403)
        elif request.path != self._path:
            request.send_error(404)
        else:
            # Whoever asks meanwhile has the file if the first one hangs up.
            with self._sending:
                self._send(request)

    def _send(self, request: "BaseHTTPRequestHandler") -> None:
        if self._fetched.is_set():
            request.send_error(404)
            return
        with self._file.open("rb") as file:
            request.send_response(200)
            request.send_header("Content-Type", "application/octet-stream")
            request.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            request.send_header("Access-Control-Allow-Origin", _PAGE)
            request.send_header("Cache-Control", "no-store")
            request.end_headers()
            shutil.copyfileobj(file, request.wfile)
        self._fetched.set()

    def _handler(self, *args: Any) -> "BaseHTTPRequestHandler":
        # Imported here: it takes half as long as all of the command line.
        from http.server import BaseHTTPRequestHandler

        files = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _STALLED_S

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

            def do_GET(self) -> None:
                files.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        return Handler(*args)
