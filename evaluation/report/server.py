"""Serve the report of a run, to this machine only, while it trains.

The server answers two fixed addresses and never opens a path from a request, so it cannot leak other files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from evaluation.report.page import page_of
from settings import UserError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves the current page at / and, at /version, a text that changes when the runs change."""

    daemon_threads = True

    def __init__(self, run_folders: Sequence[Path], port: int) -> None:
        self.runs = run_folders
        super().__init__((LOOPBACK, port), _Handler)

    def version(self) -> str:
        """Return the number of files of the runs and when the last one was written."""
        times = [path.lstat().st_mtime_ns for run in self.runs for path in run.rglob("*")]
        return f"{len(times)} {max(times)}"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; all other methods and addresses are refused, and nothing is logged."""

    timeout = 10.0  # for clients that send nothing
    server: ReportServer
    server_version, sys_version = "report", ""

    def do_GET(self) -> None:
        """Send the page or its version."""
        # Another site could point a name of its own at 127.0.0.1 and read this server through the browser.
        hosts = {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}
        try:
            if self.headers.get("Host") not in hosts or self.path not in ("/", "/version"):
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            # The version comes first, so that whatever is written while the page is built changes the next version.
            text = version = self.server.version()
            if self.path == "/":
                text = page_of(self.server.runs, version)
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"text/{'html' if self.path == '/' else 'plain'}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(text.encode("utf-8"))
        except (FileNotFoundError, UserError) as error:
            # Old previews and temporary files may disappear during training; the page will ask again.
            log.log(logging.WARNING if isinstance(error, UserError) else logging.DEBUG, "%s", error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the browser went away

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing, because the page asks every two seconds."""


def serve(run_folders: Sequence[Path], port: int) -> None:
    """Serve the page of one or several runs on the loopback interface until the command is interrupted."""
    try:
        server = ReportServer(run_folders, port)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: {port} cannot be used ({error}); give another, or 0 for any free one") from error
    with server:
        log.info("http://%s:%d/, stop with Ctrl-C", LOOPBACK, server.server_port)
        server.serve_forever(poll_interval=0.2)
