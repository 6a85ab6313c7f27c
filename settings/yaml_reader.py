"""Reads YAML 1.2 with line numbers: 1e-4 is a number, `no` is text, and a duplicate key is an error. Writes values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from runtime.files import read_text, reason
from settings.errors import ConfigError, Problem

# A complete config has 20 kB in sections nested 4 deep.
DEEPEST = 30
LARGEST_FILE = 256 * 1024


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 instead of 1.1, and without dates, sets and bytes."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's)
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "seq", "map")))
    }


def _add_scalar(kind: str, pattern: str, first: str, make: Callable[[str], Any] | None = None) -> None:
    """Have `make` read what matches a pattern and begins with one of the `first` characters."""
    tag = f"tag:yaml.org,2002:{kind}"
    _Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), [*first, *([] if make else [""])])
    if make is not None:
        _Loader.add_constructor(tag, lambda loader, node: make(str(node.value).lower()))


_add_scalar("null", r"~|null|Null|NULL|", "~nN")
_add_scalar("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", {"true": True, "false": False}.__getitem__)
_add_scalar("int", r"[-+]?[0-9]+", "-+0123456789", int)
_add_scalar(
    "float",
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    "-+.0123456789",
    lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
)


@dataclass(frozen=True)
class Document:
    """The values of a YAML file, and the line of each dotted key."""

    values: dict[str, Any]
    lines: dict[str, int]


def parse_value(text: str) -> Any:
    """Parse one value as in a file; raise `ValueError` with the reason if it is not YAML."""
    return _parse(text)[0]


def read_document(path: Path) -> Document:
    """Read a config file; raise `ConfigError` if it is missing, is not YAML, or repeats a key."""
    try:
        values, keys = _parse(read_text(path, LARGEST_FILE))
    except FileNotFoundError:
        near = ", ".join(sorted(map(str, path.parent.glob("*.yaml"))))
        remedy = f"this folder has: {near}" if near else "give the path of a YAML file"
        raise ConfigError([Problem(str(path), "no such file", "", remedy)]) from None
    except OSError as error:
        found = f"cannot be read ({reason(error)})"
        raise ConfigError([Problem(str(path), found, "allowed: a UTF-8 text file")]) from None
    except ValueError as error:
        raise ConfigError(
            [Problem(str(path), f"not valid YAML ({error})", "", "check indentation and quotes")]
        ) from None
    lines: dict[str, int] = {}
    problems = []
    for dotted, line in keys:
        if dotted in lines:
            found = f"given twice, on lines {lines[dotted]} and {line}"
            problems.append(Problem(dotted, found, "allowed: once", "remove one"))
        lines[dotted] = line
    if values is not None and not isinstance(values, dict):
        found = "holds a list" if isinstance(values, list) else f"holds one value, {str(values)[:60]!r}"
        problems.append(Problem(str(path), found, "allowed: keys with values"))
    if problems:
        raise ConfigError(problems, source=str(path))
    return Document(values or {}, lines)


def _parse(text: str) -> tuple[Any, list[tuple[str, int]]]:
    """Return the value of a text, and its dotted keys with their lines; raise `ValueError` with the reason."""
    depth = 0
    try:
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                what = "an alias; write the value out" if depth <= DEEPEST else f"nested more than {DEEPEST} deep"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node), list(_keys(node))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: the character U+{int(error.character):04X} is not allowed") from None
    except (yaml.YAMLError, ValueError, KeyError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"line {mark.line + 1}: {problem}" if mark else problem) from None


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
