"""A real Chromium without a window, driven over its driver's HTTP protocol."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
HEIGHT = 900


class Browser:
    """One session; use it as a context manager. Without Chromium and its driver, the test is skipped."""

    def __init__(self) -> None:
        browsers = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
        browser, driver = next(filter(None, browsers), None), shutil.which("chromedriver")
        if browser is None or driver is None:
            pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.binary, self.profile = browser, tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.driver = subprocess.Popen([driver, f"--port={port}"], **quiet)  # type: ignore[call-overload]

    def __enter__(self) -> Browser:
        deadline = time.monotonic() + 60
        while True:
            try:
                self._call("GET", "/status")
                break
            except OSError:
                assert time.monotonic() < deadline, "chromedriver did not start"
                time.sleep(0.1)
        options = {"binary": self.binary, "args": [*FLAGS, f"--user-data-dir={self.profile.name}"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]
        self.address += f"/session/{session}"
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=10)
        self.profile.cleanup()

    def open(self, page: Path | str, width: int = 1280, is_dark: bool = False) -> None:
        """Load a file or an address in a window of this width; forget errors and requests of earlier pages."""
        metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.protocol("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.protocol("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.errors(), self.requests()
        self._call("POST", "/url", {"url": page.resolve().as_uri() if isinstance(page, Path) else page})

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def wait_for(self, script: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {script}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """Return the new warnings and errors of the console."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked the network for since the last call."""
        entries = self._call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        addresses = [params["request"]["url"] for params in sent]
        return [address for address in addresses if address.startswith(("http:", "https:", "ws"))]

    def protocol(self, command: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the browser's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.address + path, content, {"Content-Type": "application/json"})
        request.method = method
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=90) as answer:
            return json.loads(answer.read())["value"]
