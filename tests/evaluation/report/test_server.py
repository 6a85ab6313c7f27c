"""The live page: it follows a run, writes nothing, and serves nothing but the page."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_page_and_its_version_follow_the_run_and_a_damaged_config_is_survived(server, run):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    status, page = ask(server, "/")
    assert status == 200
    assert "stage 1: step 30 of 4" in page
    status, version = ask(server, "/version")
    assert (status, version) == ask(server, "/version") == (200, version)
    assert f'"live": "{version}"' in page
    append_step(run, 31)
    assert ask(server, "/version")[1] != version
    assert "stage 1: step 31 of 4" in ask(server, "/")[1]
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text("seed: [")
    assert ask(server, "/")[0] == 503
    (run / "config.yaml").write_text(config)
    assert ask(server, "/")[0] == 200


def test_nothing_but_the_page_is_served_and_only_under_this_machines_own_name(server, run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for path in (
        *("/config.yaml", "/report.html", "/..", "/../../secret.txt", "/%2e%2e%2fsecret.txt", "//etc/passwd", "*"),
        *("/version/../../secret.txt", "/?file=/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/"),
    ):
        status, text = ask(server, path)
        assert status == 404, path
        assert "secret" not in text.replace("secret.txt", "")
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method)[0] == 501
    for host in ("", "example.com", "127.0.0.1", f"127.0.0.1.example.com:{server.server_port}"):
        assert ask(server, "/", host=host)[0] == 404
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_port_in_use_is_refused(run, server):
    for port in (server.server_port, 70_000):
        with pytest.raises(UserError, match=r"--port: \d+ cannot be used \(.+\); give another, or 0 for any free one"):
            serve([run], port)


@pytest.mark.browser
def test_new_step_appears_in_the_browser_without_losing_what_was_chosen(server, run):
    address = f"http://127.0.0.1:{server.server_port}/"
    with Browser() as browser:
        browser.open(address)
        browser.wait_for("document.querySelectorAll('#planes canvas').length === 9")
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
        assert all(url.startswith(address) for url in browser.requests())
