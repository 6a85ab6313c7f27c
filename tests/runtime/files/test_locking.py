"""Only one process at a time holds a lock, and a missing lock is announced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from runtime.files.locking import exclusive_lock

ROOT = Path(__file__).resolve().parents[3]
HOLD = (
    "import sys; from pathlib import Path; from runtime.files.locking import exclusive_lock\n"
    "with exclusive_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
)
NOTE = (
    "import sys; from pathlib import Path; from runtime.files.locking import exclusive_lock\n"
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
