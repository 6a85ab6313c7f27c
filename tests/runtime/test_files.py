"""Files are whole or absent, whatever interrupts the writing and whoever else writes; names are printed safely."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.files import check_regular, counted, exclusive_lock, printable, read_text, replacing, write_text

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


def test_a_process_waits_for_the_lock_until_its_holder_is_killed(tmp_path):
    lock, is_held = tmp_path / "new" / ".lock", threading.Event()

    def hold() -> None:
        with exclusive_lock(lock):
            is_held.set()

    pipe, command = subprocess.PIPE, [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        threading.Thread(target=hold, daemon=True).start()
        assert not is_held.wait(1)
        holder.kill()
        assert is_held.wait(30)


def test_work_continues_with_a_warning_where_no_lock_can_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with exclusive_lock(tmp_path / "file" / ".lock"):
        pass
    assert "cannot be locked" in caplog.text


def test_unprintable_characters_are_escaped_unless_kept():
    assert printable("a\n\x1b[2J\udcffé") == "a\\n\\x1b[2J\\udcffé"
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * 11, "11 bytes; the limit is 10"),
        (b"\xff\xfea\0", "UTF-16, not UTF-8"),
        (b"a\xff", "byte 1 is not UTF-8"),
    ],
)
def test_text_is_read_without_its_byte_order_mark_and_what_is_not_text_is_refused(tmp_path, content, message):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfc\xc3\xa9\r\n")
    assert read_text(tmp_path / "text", largest=10) == "cé\r\n"
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(OSError, match=message):
        read_text(tmp_path / "text", largest=10)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("file")
    assert check_regular(tmp_path / "link") == 3
    with pytest.raises(OSError, match="not a regular file"):
        check_regular(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        check_regular(tmp_path)
    with pytest.raises(OSError, match="null"):
        check_regular(tmp_path / "a\0b")


def test_nouns_are_plural_unless_there_is_one():
    said = [counted(number, noun) for noun in ("entry", "key", "process", "volume") for number in (1, 2000)]
    assert said[:4] == ["1 entry", "2,000 entries", "1 key", "2,000 keys"]
    assert said[4:] == ["1 process", "2,000 processes", "1 volume", "2,000 volumes"]
