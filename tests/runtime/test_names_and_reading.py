"""Names are printed without side effects, and only text is read as text."""

from __future__ import annotations

import os

import pytest

from runtime.files import check_regular, counted, printable, read_text


def test_unprintable_characters_are_escaped_unless_kept():
    assert printable("a\n\x1b[2J\udcffé") == "a\\n\\x1b[2J\\udcffé"
    assert printable("a\n\x1b", keep="\n") == "a\n\\x1b"


def test_text_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\r\n")
    assert read_text(tmp_path / "text") == "café\r\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * 11, "11 bytes; the limit is 10"),
        (b"\xff\xfea\0", "UTF-16, not UTF-8"),
        (b"a\xff", "byte 1 is not UTF-8"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, content, message):
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
