"""YAML without its traps: 1e-4 is a number, no is text, and a key given twice is an error."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from settings.errors import ConfigError, Problem


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2's scalars instead of YAML 1.1's."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # YAML 1.1 reads 010 as eight.
    return int(str(loader.construct_scalar(node)))


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


@dataclass(frozen=True)
class Document:
    """What a YAML file says, and on which line it says it."""

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def parse_value(text: str) -> Any:
    """Parse one value as the file would be parsed."""
    return yaml.load(text, Loader=_Loader)


def read_document(path: Path) -> Document:
    """Read a config file; raise `ConfigError` when it is missing, not YAML, or repeats a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        remedy = f"there is: {', '.join(near)}" if near else "give the path of a YAML file"
        raise ConfigError([Problem(str(path), "no such file", "", remedy)]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read ({error})", "allowed: a UTF-8 text file")]) from None
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems: list[Problem] = []
        lines: dict[str, int] = {}
        if node is not None:
            _walk(node, "", path, lines, problems)
        if problems:
            raise ConfigError(problems, source=str(path))
        values = {} if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        detail = getattr(error, "problem", None) or str(error) or "too deeply nested"
        raise ConfigError([Problem(where, f"not valid YAML ({detail})", "", "check indentation and quotes")]) from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError([Problem(str(path), f"holds a {type(values).__name__}", "allowed: keys and values")])
    return Document(values, lines)


def _walk(node: yaml.Node, prefix: str, path: Path, lines: dict[str, int], problems: list[Problem]) -> None:
    """Note the line of each key, and each key that stands twice in one mapping."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        dotted = f"{prefix}{name.value}"
        line = name.start_mark.line + 1
        if dotted in lines:
            found = f"given twice, on lines {lines[dotted]} and {line}"
            problems.append(Problem(dotted, found, "allowed: once", "remove one"))
        lines[dotted] = line
        _walk(value, f"{dotted}.", path, lines, problems)
