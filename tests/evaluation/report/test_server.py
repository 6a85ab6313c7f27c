"""The live page: it follows a run, writes nothing, and serves nothing but the page."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import evaluation.report.server
from evaluation.report.server import ReportServer, serve
from settings import UserError
from tests.browser import Browser
from tests.report_run import make_run


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "secret.txt").write_text("secret")
    return make_run(tmp_path / "runs")


@pytest.fixture
def server(run) -> Iterator[ReportServer]:
    with ReportServer([run], 0) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode("utf-8")
    connection.close()
    return answer.status, text


def append_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"stage": "autoencoder", "step": step, "reconstruction": 0.01}) + "\n")


def test_page_and_its_version_follow_the_run(server, run):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    status, page = ask(server, "/")
    assert status == 200
    assert "stage 1: step 30 of 4" in page
    status, version = ask(server, "/version")
    assert status == 200
    assert ask(server, "/version") == (200, version)
    assert f'"live": "{version}"' in page
    append_step(run, 31)
    assert ask(server, "/version")[1] != version
    assert "stage 1: step 31 of 4" in ask(server, "/")[1]
    assert ask(server, "/", "HEAD") == (200, "")


@pytest.mark.parametrize(
    "path",
    [
        *("/config.yaml", "/metrics.jsonl", "/report.html", "/previews/volumes", "/..", "/../secret.txt"),
        *("/../../secret.txt", "/%2e%2e/secret.txt", "/%2e%2e%2fsecret.txt", "/..%2fsecret.txt", "/..%5csecret.txt"),
        *(
            "/%252e%252e/secret.txt",
            "/etc/passwd",
            "//etc/passwd",
            "/version/../../secret.txt",
            "/./",
            "/?file=/etc/passwd",
        ),
        *("/version?/../secret.txt", "/version/", "file:///etc/passwd", "http://127.0.0.1/", "*", "/\\..\\secret.txt"),
    ],
)
def test_every_other_address_is_not_found(server, path):
    status, text = ask(server, path)
    assert status == 404
    assert "secret" not in text.replace("secret.txt", "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MOVE"])
def test_methods_other_than_reading_are_refused(server, run, method):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert ask(server, "/", method)[0] == 501
    ask(server, "/")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("host", ["", "example.com", "example.com:80", "127.0.0.1", "127.0.0.1.example.com:{port}"])
def test_requests_under_other_host_names_are_refused(server, host):
    assert ask(server, "/", host=host.format(port=server.server_port))[0] == 404
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.json", "previews/volumes/ldm_00000005_sample_0.png"])
def test_links_out_of_the_run_folder_are_not_followed(server, run, tmp_path, name):
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    assert ask(server, "/")[0] == 404
    assert ask(server, "/version")[0] == 404


def test_port_in_use_is_refused(run, server):
    with pytest.raises(UserError, match=r"--port: \d+ cannot be used \(.+\); give another, or 0 for any free one"):
        serve([run], server.server_port)
    with pytest.raises(UserError, match="--port: 70000 is not a port"):
        serve([run], 70_000)


@pytest.mark.browser
def test_new_step_appears_in_the_browser_without_losing_what_was_chosen(server, run):
    with Browser(1280, 900) as browser:
        browser.open_address(server.address)
        browser.wait_for("document.querySelectorAll('#planes canvas').length === 9")
        assert "step 30 of 4" in browser.run("return document.getElementById('header').innerText")
        browser.run("const p = document.getElementById('plane'); p.value = 1; p.dispatchEvent(new Event('change'))")
        browser.run("setWindow(0.3, 0.5)")
        append_step(run, 31)
        browser.wait_for("document.getElementById('header').innerText.includes('step 31 of 4')")
        browser.wait_for(
            "data.curves.find(c => c.title === 'Reconstruction loss').series[0].points.some(p => p[0] === 31)"
        )
        assert browser.run("return [view.axis, view.level, view.width]") == [1, 0.3, 0.5]
        browser.wait_for("document.querySelector('#sample-gallery canvas').dataset.axis === '1'")
        assert browser.errors() == []
        asked = [url for url in browser.requests() if url.startswith(("http:", "https:", "ws"))]
        outside = [url for url in asked if not url.startswith(server.address)]
        assert outside == []


def test_clients_that_send_nothing_are_dropped(server, monkeypatch):
    assert 0 < evaluation.report.server._Handler.timeout <= 30
    monkeypatch.setattr(evaluation.report.server._Handler, "timeout", 0.5)
    silent = [socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(3)]
    silent[0].sendall(b"GET / HT")
    assert [client.recv(1) for client in silent] == [b""] * 3
    assert ask(server, "/version")[0] == 200
    for client in silent:
        client.close()
