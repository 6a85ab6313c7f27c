"""No code from files is executed, and file names cannot control the terminal."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

from runtime.cli.execution import _set_up_logging
from runtime.files.names import printable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py"))
    if path.relative_to(ROOT).parts[0] not in ("runs", "tests")
)
FORBIDDEN = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load", "os.system"}
NEEDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_is_read_from_files(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        assert name not in FORBIDDEN, f"line {node.lineno}"
        assert "shell" not in keywords, f"line {node.lineno}"
        if name in NEEDED:
            keyword, value = NEEDED[name]
            assert ast.unparse(keywords[keyword]) == str(value), f"line {node.lineno}"
        if name == "yaml.load":
            assert ast.unparse(keywords["Loader"]) == "_Loader", f"line {node.lineno}"


def test_control_characters_are_escaped_in_messages_and_logs(capsys):
    name = "a\x1b[2J\r\x07\u202eb\x9bc"
    assert printable(f"first\n\t{name}", keep="\n\t") == "first\n\ta\\x1b[2J\\r\\x07\\u202eb\\x9bc"
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        _set_up_logging(quiet=False)
        logging.getLogger("test").warning("%s: odd", name)
        assert "\x1b" not in capsys.readouterr().err
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
