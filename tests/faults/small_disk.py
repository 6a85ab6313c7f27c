"""Run by test_disk.py: trains with runs/tiny on a disk of its own, too small at first, later read-only.

python small_disk.py KIBIBYTES; prints the exit code of each act. Only a process of its own may mount.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNS = 0x00020000


def train(act: str) -> None:
    """Run stage 1 as a command and print how it ended."""
    sys.argv = [str(ROOT / "train_autoencoder.py"), "--config", "tiny.yaml"]
    print(f"act: {act}", flush=True)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(f"{act} ended with {end.code}", flush=True)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    disk = os.path.abspath("runs/tiny")
    os.makedirs(disk)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        print("cannot mount here")
        return
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", f"size={sys.argv[1]}k", "tmpfs", disk)
    train("small")
    mount("-o", "remount,size=64m", disk)
    train("large")
    mount("-o", "remount,ro", disk)
    train("read-only")
    print("weights:", Path(disk, "autoencoder.safetensors").read_bytes().hex())


if __name__ == "__main__":
    main()
