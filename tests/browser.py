"""A real Chromium without a window, driven over its driver's HTTP protocol."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
START_SECONDS = 60


def find_browser() -> tuple[str, str]:
    """Return browser and driver, or skip the test with the reason."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    return browser, driver


class Browser:
    """One session; use it as a context manager."""

    def __init__(self, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        self.browser, driver = find_browser()
        self.port = _free_port()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(
            [driver, f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._session = ""
        self._size, self._is_dark = (width, height), is_dark

    def __enter__(self) -> Browser:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._call("GET", "/status")
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, "chromedriver did not start"
                time.sleep(0.1)
        options = {
            "binary": self.browser,
            "args": [*FLAGS, f"--user-data-dir={self.profile.name}", f"--window-size={self._size[0]},{self._size[1]}"],
        }
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]
        metrics = {"width": self._size[0], "height": self._size[1], "deviceScaleFactor": 1, "mobile": False}
        self.protocol("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._is_dark else "light"}
        self.protocol("Emulation.setEmulatedMedia", {"features": [scheme]})
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._session:
                self._call("DELETE", f"/session/{self._session}")
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=10)
            self.profile.cleanup()

    def open(self, path: Path) -> None:
        """Load a file."""
        self.open_address(path.resolve().as_uri())

    def open_address(self, address: str) -> None:
        """Load a page."""
        self._call("POST", f"/session/{self._session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self._call("POST", f"/session/{self._session}/execute/sync", {"script": script, "args": []})

    def wait_for(self, script: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {script}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """Return the warnings and errors of the console."""
        entries = self._call("POST", f"/session/{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the addresses of all requests that the page has made."""
        entries = self._call("POST", f"/session/{self._session}/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def protocol(self, command: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the browser's own protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"/session/{self._session}/goog/cdp/execute", body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=90) as answer:
            return json.loads(answer.read())["value"]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
