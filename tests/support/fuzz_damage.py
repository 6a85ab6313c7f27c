"""Ways to damage a file: what disks, transfers, editors and other programs do to it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 2**63, 10**400, 1.5, float("nan"), float("-inf"), "", "x", "\ud800", "../../x", "x" * 5000),
    *([], [[]], {}, {"": None}, [None] * 50, {"a": {"b": {}}}),
)
ODD_TEXTS = (
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"null", b"[]", b"{}", b"3", b'"x"', b"{", b"[" * 3000, b"{" * 3000),
    *(b"NaN", b"1" * 5000, b"\x80\x81", b"a: &a [*a]", b"\t: x", b"- - -", b"!!python/name:os.system x", b"\r\r\r"),
    *(b"a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c]",),
)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return content that was cut, changed, doubled, overwritten or has lost a piece."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 6))):
        # Headers are at the front, and most of what a reader decides is in them.
        place = rng.randrange(max(1, rng.choice((len(result), min(len(result), 400)))))
        kind = rng.randrange(7)
        if kind == 0:
            del result[place:]
        elif kind == 1 and place < len(result):
            result[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            result[place : place + 4] = rng.choice(
                (b"\xff\xff\xff\x7f", b"\0\0\xc0\x7f", b"\0\0\0\0", rng.randbytes(4))
            )
        elif kind == 3:
            del result[place : place + rng.randrange(1, 40)]
        elif kind == 4:
            result[place:place] = result[place : place + 30]
        elif kind == 5:
            result[place:place] = rng.choice(ODD_TEXTS)
        else:
            result[place : place + 512] = bytes(len(result[place : place + 512]))
    return bytes(result)


def damage_values(values: Any, rng: random.Random) -> Any:
    """Return nested values with one of them replaced, removed or renamed."""
    if not isinstance(values, dict | list) or not values or rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    result = values.copy()
    keys = list(result) if isinstance(result, dict) else range(len(result))
    key = rng.choice(keys)
    if rng.random() < 0.15:
        del result[key]
    elif isinstance(result, dict) and rng.random() < 0.1:
        result[rng.choice(("", "step", "\ud800", "x" * 300))] = result.pop(key)
    else:
        result[key] = damage_values(result[key], rng)
    return result


def damage_json(content: bytes, rng: random.Random) -> bytes:
    """Return JSON, or JSON lines, in which one value has another type."""
    lines = content.decode().splitlines() if content.count(b"\n{") > 1 else [content.decode()]
    place = rng.randrange(len(lines))
    lines[place] = json.dumps(damage_values(json.loads(lines[place]), rng))
    return ("\n".join(lines) + "\n").encode()


def damage_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Return weights whose header is well-formed JSON that says something else."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(damage_values(json.loads(content[8 : 8 + length]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def damage_yaml(content: bytes, rng: random.Random) -> bytes:
    """Return YAML with one line changed, doubled, moved or indented differently."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        lines[place] = re.sub(rb":.*", b": " + rng.choice(ODD_TEXTS)[:200], lines[place])
    elif kind == 1:
        lines.insert(place, rng.choice(lines))
    elif kind == 2:
        lines[place] = b"  " + lines[place]
    elif kind == 3:
        value = json.dumps(rng.choice(ODD_VALUES)).encode()
        lines[place] = re.sub(rb":.*", lambda _: b": " + value, lines[place])
    else:
        del lines[place]
    return b"\n".join(lines) + b"\n"


def _missing(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


PLACES: tuple[Callable[[Path], None], ...] = (_missing, _folder, _pipe, _loop, _dangling, _device)
STRUCTURED = {
    ".json": damage_json,
    ".jsonl": damage_json,
    ".yaml": damage_yaml,
    ".safetensors": damage_safetensors,
}


def damage_file(path: Path, rng: random.Random) -> str:
    """Damage a file in place, and say how in a few words."""
    draw = rng.random()
    if draw < 0.2:
        change = rng.choice(PLACES)
        change(path)
        return change.__name__.strip("_")
    if draw < 0.3:
        path.write_bytes(
            rng.choice((*ODD_TEXTS, rng.randbytes(300), path.read_bytes().decode("latin-1").encode("utf-16")))
        )
        return "other content"
    if draw < 0.65 and path.suffix in STRUCTURED:
        path.write_bytes(STRUCTURED[path.suffix](path.read_bytes(), rng))
        return "other values"
    path.write_bytes(damage_bytes(path.read_bytes(), rng))
    if path.suffix == ".pt" and rng.random() < 0.5:
        # A name whose hash matches the damaged content.
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        path.rename(path.with_name(path.name.rsplit("_", 1)[0] + f"_{digest}.pt"))
        return "other bytes under their own checksum"
    return "other bytes"


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder for one case, so that no case sees what another did."""
    shutil.copytree(source, target, symlinks=True)
