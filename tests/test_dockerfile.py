"""The Dockerfile, as far as one can check it without an engine."""

from __future__ import annotations

import json
import re
import tomllib

from tests.conftest import ROOT

LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
STEPS = [line.partition(" ")[::2] for line in LINES if line and not line.startswith("#")]


def test_it_copies_what_exists_and_runs_the_installed_command_without_privileges():
    names = [name for name, _ in STEPS]
    sources = [source for name, words in STEPS if name == "COPY" for source in words.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    user = dict(STEPS)["USER"]
    assert re.search(rf"useradd [^&]*\b{user}\s*&&", "\n".join(LINES))
    assert names.index("USER") > max(place for place, name in enumerate(names) if name in ("RUN", "COPY"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert json.loads(dict(STEPS)["ENTRYPOINT"]) == [*project["scripts"]]
    python = re.search(r"python:3\.(\d+)-slim", STEPS[0][1])
    assert python is not None
    assert (11 <= int(python[1]) < 14, project["requires-python"]) == (True, ">=3.11,<3.14")
