"""Serve the report of a run, to this machine only, while it trains.

The server answers two fixed addresses and never opens a path from a request, so it cannot leak other files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from evaluation.report.page import page_of
from runtime.files import STAGES, RunFolder, printable
from settings import UserError
from training.validation.previews import viewer_folder

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LARGEST_PORT = 65_535
TIMEOUT_SECONDS = 10.0
"""A browser on this machine sends its request and takes what is sent much faster."""


class ReportServer(ThreadingHTTPServer):
    """Serves the current page at / and, at /version, a hash that changes when the runs change."""

    daemon_threads = True

    def __init__(self, run_folders: Sequence[Path], port: int) -> None:
        self.runs = [RunFolder(Path(folder)) for folder in run_folders]
        super().__init__((LOOPBACK, port), _Handler)

    @property
    def address(self) -> str:
        """Return the address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    def version(self) -> str:
        """Return a hash of the state of all shown files; raise `UserError` if one is outside its run folder."""
        marks = []
        for run in self.runs:
            root = run.path.resolve()
            for path in _files(run):
                if not path.resolve().is_relative_to(root):
                    raise UserError(f"{printable(path)}: links to a file outside the run folder; remove the link")
                found = path.stat()
                marks.append(f"{path} {found.st_mtime_ns} {found.st_size} {found.st_ino}")
        return hashlib.sha256("\n".join(marks).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def page(self) -> str:
        """Return the current page of the runs."""
        # Take the version first, so that whatever is written while the page is built changes the next version.
        version = self.version()
        return page_of([run.path for run in self.runs], version)


def _files(run: RunFolder) -> Iterator[Path]:
    """Return the existing files of a run that the page is made from."""
    records = (run.config, run.environment, run.metrics, run.evaluation, run.path / "oom_report.json")
    memory = (run.path / f"memory_{stage}.json" for stage in STAGES)
    weights = (run.weights(stage) for stage in STAGES)
    pictures = sorted(viewer_folder(run).glob("*.png"))
    return (path for path in (*records, *memory, *weights, *pictures) if path.exists())


class _Handler(BaseHTTPRequestHandler):
    """Handles GET and HEAD; refuses all other methods and addresses."""

    timeout = TIMEOUT_SECONDS
    server: ReportServer
    server_version, sys_version = "report", ""

    def do_GET(self) -> None:
        """Send the page or its version."""
        # Another site could point a name of its own at 127.0.0.1 and read this server through the browser.
        allowed = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        if self.headers.get("Host") not in allowed:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            if self.path == "/":
                self._answer(self.server.page(), "text/html; charset=utf-8")
            elif self.path == "/version":
                self._answer(self.server.version(), "text/plain; charset=utf-8")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except UserError as error:
            log.warning("%s", error)
            self.send_error(HTTPStatus.NOT_FOUND)
        except FileNotFoundError as error:
            # Old previews and temporary files may disappear during training; the page will ask again.
            log.debug("%s", error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the browser went away

    def do_HEAD(self) -> None:
        """Send the headers alone."""
        self.do_GET()

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode("utf-8")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing, because the page asks every two seconds."""


def serve(run_folders: Sequence[Path], port: int) -> None:
    """Serve the page of one or several runs on the loopback interface until the command is interrupted."""
    if port > LARGEST_PORT:
        raise UserError(
            f"--port: {port} is not a port; allowed: 0 to {LARGEST_PORT}; give another, or 0 for any free one"
        )
    try:
        server = ReportServer(run_folders, port)
    except OSError as error:
        raise UserError(
            f"--port: {port} cannot be used ({error.strerror}); give another, or 0 for any free one"
        ) from error
    with server:
        log.info("%s, stop with Ctrl-C", server.address)
        server.serve_forever(poll_interval=0.2)
