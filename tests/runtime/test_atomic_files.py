"""Files are complete or absent, whatever interrupts the writing and whoever else writes; a lock has one holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.files import exclusive_lock, replacing, write_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("before", [None, "old"])
def test_a_failed_write_leaves_the_file_as_it_was_and_nothing_else(tmp_path, before):
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_the_content_is_flushed_to_disk_before_the_rename(tmp_path, monkeypatch):
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted(name, call):
        def run(*arguments):
            calls.append(name)
            return call(*arguments)

        return run

    monkeypatch.setattr(os, "fsync", noted("fsync", fsync))
    monkeypatch.setattr(os, "replace", noted("replace", replace))
    write_text(tmp_path / "file.txt", "text")
    # The file, its new name, and the folder that holds the name.
    assert calls == ["fsync", "replace", "fsync"]


def test_threads_that_write_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "file.txt"
    texts = [letter * 1000 for letter in "ab"]
    both_opened = threading.Barrier(2)
    errors: list[OSError] = []

    def write(text: str) -> None:
        try:
            with replacing(path) as temporary:
                temporary.write_text(text)
                both_opened.wait(10)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


HOLD = (
    "import sys; from pathlib import Path; from runtime.files import exclusive_lock\n"
    "with exclusive_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)
NOTE = (
    "import sys; from pathlib import Path; from runtime.files import exclusive_lock\n"
    "with exclusive_lock(Path(sys.argv[1])): Path(sys.argv[2]).touch()"
)


def test_a_process_waits_for_the_lock_until_its_holder_is_killed(tmp_path):
    lock, mark = tmp_path / "new" / ".lock", tmp_path / "mark"
    pipe, command = subprocess.PIPE, [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with subprocess.Popen([sys.executable, "-c", NOTE, str(lock), str(mark)], cwd=ROOT) as waiting:
            try:
                waiting.wait(1)
            except subprocess.TimeoutExpired:
                assert not mark.exists()
            else:
                raise AssertionError("did not wait")
            holder.kill()
            assert waiting.wait(30) == 0
    assert mark.exists()


def test_work_continues_with_a_warning_where_no_lock_can_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with exclusive_lock(tmp_path / "file" / ".lock"):
        pass
    assert "cannot be locked" in caplog.text
