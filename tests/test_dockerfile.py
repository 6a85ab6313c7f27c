"""The Dockerfile, as far as one can check it without an engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]


def test_it_copies_what_exists_and_runs_the_installed_command_without_privileges():
    names = [name for name, _ in STEPS]
    assert names[0] == "FROM"
    assert {*names} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    for name, words in STEPS:
        if name == "COPY":
            *sources, _ = words.split()
            assert all((ROOT / source).exists() for source in sources)
    (user,) = [words for name, words in STEPS if name == "USER"]
    created = re.search(r"useradd .*?(\w+)\s*&&", " ".join(words for name, words in STEPS if name == "RUN"))
    assert created is not None
    assert created[1] == user
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))
    values = {name: json.loads(words) for name, words in STEPS if name in ("VOLUME", "ENTRYPOINT", "CMD")}
    assert values["VOLUME"] == ["/data", "/app/runs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert values["ENTRYPOINT"] == [*project["scripts"]]
    python = re.search(r"python:(\d)\.(\d+)-slim", STEPS[0][1])
    assert python is not None
    assert project["requires-python"] == ">=3.11,<3.14"
    assert (3, 11) <= (int(python[1]), int(python[2])) < (3, 14)


def test_the_package_index_chooses_cpu_or_cuda_and_the_image_leaves_out_what_is_large():
    text = "\n".join(LINES)
    assert "ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu" in text
    assert '--extra-index-url "$TORCH_INDEX" -r requirements.txt' in text
    assert {".git", ".venv*", "runs"} <= {*(ROOT / ".dockerignore").read_text().split()}
