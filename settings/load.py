"""Turns a YAML file and overrides into validated settings or one report of everything that is wrong, and back.

The YAML is that of version 1.2: 1e-4 is a number and `no` is text. A duplicate key is an error.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from runtime.files import read_text, reason, shortened
from settings.errors import CheckpointError, ConfigError, Problem
from settings.root import Settings
from settings.section import FOLDER_NAME, WITHOUT_NUL, assign, is_section, look_up, overlap, value_text

DEFAULT = Path(__file__).resolve().parents[1] / "configs" / "default.yaml"
"""Has the keys that every preset shows, in their order."""

COMMENT_COLUMN = 40
Comment = Callable[[str, Any], str]
"""Returns the comment of a key, from its dotted name and its field; empty: none."""

OUR_WORDS = {
    f"String should match pattern '{FOLDER_NAME}'": "letters, digits, _, - and dots, the first a letter, digit or _",
    f"String should match pattern '{WITHOUT_NUL}'": "text without NUL characters",
    "Input should be ": "",
    "a valid boolean": "true or false",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid tuple": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    "Tuple should have": "a list of",
    "String should have": "text of",
    "None": "null",
    "'": "",
    " after validation": "",
}
"""Pydantic's words for what it accepts, and those of a config's users."""


# A complete config has 20 kB, 300 keys and values, and sections nested 4 deep. Huge ones take seconds to be refused.
LARGEST_FILE = 256 * 1024
MOST_VALUES = 5000
DEEPEST = 30


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
        found = f"not valid YAML ({error})"
        raise ConfigError([Problem(str(path), found, "", "check indentation and quotes")]) from None
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
        for number, event in enumerate(yaml.parse(text, _Loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            what = "an alias; write the value out" if isinstance(event, yaml.AliasEvent) else ""
            what = f"nested more than {DEEPEST} deep" if depth > DEEPEST else what
            what = f"more than {MOST_VALUES} keys and values" if number > MOST_VALUES else what
            if what:
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


def load_settings(path: str | Path, overrides: Sequence[str] = (), stage: str | None = None) -> Settings:
    """Read, override and validate a config; raise `ConfigError` with every problem found.

    `stage` is the one that will run, "autoencoder" or "ldm"; at present every rule holds for both.
    """
    path = Path(path)
    document = read_document(path)
    values = {"name": path.stem, **document.values}
    overridden, problems = _apply(values, overrides)
    try:
        settings = validate(values)
    except ConfigError as error:
        for problem in sorted(error.problems, key=lambda problem: document.lines.get(problem.where, 0)):
            if any(overlap(problem.where, dotted) for dotted in overridden):
                problems.append(problem)
            else:
                line = document.lines.get(problem.where)
                problems.append(problem if line is None else replace(problem, where=f"line {line}, {problem.where}"))
    if problems:
        raise ConfigError(problems, source=f"{path} with the overrides" if overrides else str(path))
    return settings


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides as values by dotted key; raise `ConfigError` for unknown keys and wrong values.

    Rules that involve several keys are left to `validate`, which sees the others.
    """
    values: dict[str, Any] = {}
    overridden, problems = _apply(values, overrides)
    try:
        checked = Settings.model_validate(values, context={"without_rules": True})
        values = checked.model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        problems += _translate(error.errors(include_url=False), values).values()
    if problems:
        raise ConfigError(problems, source="the overrides")
    return {dotted: look_up(values, dotted) for dotted in overridden}


def validate(values: dict[str, Any]) -> Settings:
    """Validate nested values; raise `ConfigError` with every problem, whether with one key or between several."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        wrong = _translate(error.errors(include_url=False), values)
    pruned = copy.deepcopy(values)
    for dotted in wrong:
        parent, _, last = dotted.rpartition(".")
        section = look_up(pruned, parent) if parent else pruned
        if isinstance(section, dict):
            section.pop(last, None)
    problems = list(wrong.values())
    try:
        # pydantic runs the rules only once every key is valid, so run them again without the invalid keys.
        # A further ValidationError concerns something that is already reported.
        with suppress(ValidationError):
            Settings.model_validate(pruned, context={"failed": frozenset(wrong)})
    except ConfigError as rules:
        problems += rules.problems
    raise ConfigError(problems)


def stored(settings: Settings) -> dict[str, Any]:
    """Return the settings as checkpoints and weight files store them: every key, so that a default may change."""
    return settings.model_dump(mode="json")


def restored(values: dict[str, Any], where: object) -> Settings:
    """Return stored settings; raise `CheckpointError` unless they have exactly the keys of this version."""
    way_out = "use the version of the program that wrote them, or start a new run"
    missing = [dotted for dotted in _leaves() if look_up(values, dotted, _leaves) is _leaves]
    if missing:
        raise CheckpointError(f"{where}: its settings lack {missing[0]}; {way_out}")
    try:
        return validate(values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: its settings cannot be used; {way_out}: {error}") from None


def known_keys(kind: Any = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its field, each section before its keys."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        if is_section(field):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


def _leaves() -> Iterator[str]:
    return (dotted for dotted, field in known_keys() if not is_section(field))


def default_text(field: Any) -> str:
    """Return the default of a key as YAML on one line."""
    return value_text(field.get_default(call_default_factory=True))


def dump_yaml(settings: Settings) -> str:
    """Return every key for a run folder, from which `load_settings` restores equal settings; marks non-defaults."""
    defaults = Settings()

    def comment(dotted: str, field: Any) -> str:
        default = look_up(defaults, dotted)
        return "" if dotted == "name" or default == look_up(settings, dotted) else f"default: {value_text(default)}"

    head = "# The complete settings of this run; those that are not the default say so.\n"
    return head + yaml_text(settings, _leaves(), comment)


def dump_with_origins(path: str | Path, overrides: Sequence[str]) -> str:
    """Return every key of a config with where its value comes from: default, file or command line."""
    settings = load_settings(path, overrides)
    lines = read_document(Path(path)).lines
    overridden = [override.partition("=")[0] for override in overrides]

    def origin(dotted: str, field: Any) -> str:
        if any(overlap(dotted, key) for key in overridden):
            return "command line"
        if dotted == "data.prepared" and "data.cache_rate" in lines:
            dotted = "data.cache_rate"
        if dotted in lines:
            return f"{Path(path).name}, line {lines[dotted]}"
        return "name of the file" if dotted == "name" else "default"

    return yaml_text(settings, _leaves(), origin)


def dump_short(settings: Settings, comment: Comment = lambda dotted, field: "") -> str:
    """Return what every preset shows, and every other key that is not the default."""
    defaults = Settings()
    leaves = list(_leaves())
    shown = [dotted for dotted in read_document(DEFAULT).lines if dotted in leaves]
    others = [leaf for leaf in leaves if leaf not in shown and look_up(settings, leaf) != look_up(defaults, leaf)]
    return yaml_text(settings, [*shown, *others], comment)


def yaml_text(settings: Settings, keys: Iterable[str], comment: Comment) -> str:
    """Return these keys as YAML, a line for each, with those of one section together."""
    tree: dict[str, Any] = {}
    for dotted in keys:
        assign(tree, dotted, dotted)
    fields = dict(known_keys())

    def lines(section: dict[str, Any], indent: str) -> Iterator[str]:
        for name, entry in section.items():
            if isinstance(entry, dict):
                yield f"{indent}{name}:" if indent else f"\n{name}:"
                yield from lines(entry, indent + "  ")
            else:
                line = f"{indent}{name}: {value_text(look_up(settings, entry))}"
                note = comment(entry, fields[entry])
                yield f"{line.ljust(COMMENT_COLUMN - 1)} # {note}" if note else line

    return "\n".join(lines(tree, "")).lstrip("\n") + "\n"


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Apply overrides to the values; return the keys that they set, and a problem for each that cannot be applied."""
    overridden, problems = [], []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        try:
            if not equals or not all(dotted.split(".")):
                raise ValueError("no key and value")
            assign(values, dotted, parse_value(text))
            overridden.append(dotted)
        except ValueError as error:
            found = f"not an override ({error})"
            problems.append(Problem(shortened(override), found, "allowed: section.key=value", "correct or quote it"))
    return overridden, problems


def _translate(errors: list[ErrorDetails], values: dict[str, Any]) -> dict[str, Problem]:
    """Turn pydantic's errors into problems, one per key."""
    fields = dict(known_keys())
    grouped: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        # The config key, without list positions and union members.
        parts: list[str] = []
        for part in error["loc"]:
            if parts and not ((field := fields.get(".".join(parts))) and is_section(field)):
                break
            parts.append(str(part))
        grouped.setdefault(".".join(parts), []).append(error)
    return {
        where: _problem(where, fields.get(where), group, look_up(values, where)) for where, group in grouped.items()
    }


def _problem(where: str, field: Any, group: list[ErrorDetails], value: Any) -> Problem:
    if field is None:
        # Letters of other alphabets can look like ASCII letters.
        return Problem(where, "unknown key" + ("" if where.isascii() else f", in ASCII {where!a}"), "", _suggest(where))
    if is_section(field):
        return Problem(where, f"{value!r} is not a section", "", "indent its keys below it")
    # A list with a wrong entry also counts as too short.
    entries = [error for error in group if any(isinstance(part, int) for part in error["loc"])]
    allowed = " or ".join(dict.fromkeys(map(_allowed, entries or group)))
    found = f"found {shortened(repr(value) if isinstance(value, str) else value_text(value, allow_unicode=True))}"
    return Problem(where, found, f"allowed: {allowed}", f"for example {default_text(field)}")


def _allowed(error: ErrorDetails) -> str:
    """Say which values a pydantic error would accept."""
    text = error["msg"]
    for theirs, ours in OUR_WORDS.items():
        text = text.replace(theirs, ours)
    return f"a list whose entries are each {text}" if any(isinstance(part, int) for part in error["loc"]) else text


def _suggest(where: str) -> str:
    """Suggest known keys for an unknown one: those of the same name, else one of a similar name, else its section's."""
    names = [name for name, _ in known_keys()]
    parent, _, last = where.lower().rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == parent]
    by_name = {name.rpartition(".")[2]: name for name in (*reversed(names), *siblings)}
    near = [name for name in names if name.rpartition(".")[2] == last]
    near = near or [by_name[name] for name in difflib.get_close_matches(last, by_name, n=1, cutoff=0.7)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"this section has: {', '.join(name.rpartition('.')[2] for name in siblings or Settings.model_fields)}"
