"""Reads YAML 1.2 with line numbers: 1e-4 is a number, `no` is text, and a duplicate key is an error. Writes values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.files import read_text, reason
from settings.errors import ConfigError, Problem

# A complete config has about 200 values in sections nested 4 deep.
MOST_VALUES = 10_000
DEEPEST = 30
LARGEST_FILE = 1024 * 1024


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 instead of 1.1, limited in depth and in values after alias expansion."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node; an alias counts as many values as its anchor holds."""
        event = self.peek_event()
        mark: Any = event.start_mark
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested more than {DEEPEST} deep", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent) and node not in self._num_values:
            raise yaml.MarkedYAMLError(problem="an alias refers to a value that contains it", problem_mark=mark)
        self._num_values.setdefault(node, 1 + sum(map(self._num_values.__getitem__, _parts(node))))
        if max(self._num_values[node], len(self._num_values)) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values", problem_mark=mark)
        return node


def _parts(node: Any) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


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


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """Return the number or boolean of a scalar by the rules of YAML 1.2, in which 010 is ten."""
    text = str(loader.construct_scalar(node)).lower()
    if node.tag.endswith(":int"):
        return int(text)
    if node.tag.endswith(":float"):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


# A config needs no dates, sets or bytes.
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rsplit(":", 1)[-1] in ("null", "str", "seq", "map")
}
for _tag in ("bool", "int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _scalar)


@dataclass(frozen=True)
class Document:
    """The values of a YAML file, and the line of each dotted key."""

    values: dict[str, Any]
    lines: dict[str, int]


class _NotYamlError(ValueError):
    """Text that is not YAML, with the line of the error if it is known."""

    def __init__(self, reason: str, line: int | None) -> None:
        super().__init__(reason)
        self.line = line


def parse_value(text: str) -> Any:
    """Parse one value as in a file; raise `ValueError` with the reason if it is not YAML."""
    return _parse(text)[0]


def read_document(path: Path) -> Document:
    """Read a config file; raise `ConfigError` if it is missing, is not YAML, or repeats a key."""
    try:
        values, keys = _parse(read_text(path, LARGEST_FILE))
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        remedy = f"this folder has: {', '.join(near)}" if near else "give the path of a YAML file"
        raise ConfigError([Problem(str(path), "no such file", "", remedy)]) from None
    except OSError as error:
        found = f"cannot be read ({reason(error)})"
        raise ConfigError([Problem(str(path), found, "allowed: a UTF-8 text file")]) from None
    except _NotYamlError as error:
        where = f"{path}:{error.line}" if error.line else str(path)
        raise ConfigError([Problem(where, f"not valid YAML ({error})", "", "check indentation and quotes")]) from None
    lines: dict[str, int] = {}
    problems = []
    for dotted, line in keys:
        if dotted in lines:
            found = f"given twice, on lines {lines[dotted]} and {line}"
            problems.append(Problem(dotted, found, "allowed: once", "remove one"))
        lines[dotted] = line
    if problems:
        raise ConfigError(problems, source=str(path))
    if values is not None and not isinstance(values, dict):
        found = "holds a list" if isinstance(values, list) else f"holds one value, {str(values)[:60]!r}"
        raise ConfigError([Problem(str(path), found, "allowed: keys with values")])
    return Document(values or {}, lines)


def _parse(text: str) -> tuple[Any, list[tuple[str, int]]]:
    """Return the value of a text, and its dotted keys with their lines; raise `_NotYamlError`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        # First the keys, because constructing a document adds those that << merges.
        keys = list(_keys(node))
        return None if node is None else loader.construct_document(node), keys
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _NotYamlError(f"the character U+{int(error.character):04X} is not allowed", line) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise _NotYamlError(problem, mark.line + 1 if mark else None) from None


def _keys(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield each dotted key below a node with its line."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _keys(value, f"{prefix}{name.value}.")


def value_text(value: Any, allow_unicode: bool = False) -> str:
    """Return a value as YAML on one line."""
    options: dict[str, Any] = {"default_flow_style": True, "width": float("inf"), "allow_unicode": allow_unicode}
    text = yaml.safe_dump(plain := _plain(value), **options).removesuffix("\n").removesuffix("\n...")
    if "\n" in text:  # a line break inside a text, which only double quotes escape
        text = yaml.safe_dump(plain, **options, default_style='"').removesuffix("\n")
    return text


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
