"""Turns a YAML file and overrides into validated settings, or into one report of everything that is wrong."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings import migrations
from settings.dotted import assign, has_key, look_up, overlap, remove
from settings.errors import CheckpointError, ConfigError, Problem
from settings.migrations import upgraded
from settings.root import Settings
from settings.section import FOLDER_NAME, WITHOUT_NUL, is_section
from settings.yaml_reader import parse_value, read_document
from storage.names import counted

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_PATTERNS = {
    WITHOUT_NUL: "text without NUL characters",
    FOLDER_NAME: "letters, digits, _, - and dots, the first of them a letter, digit or _",
}


def load_settings(path: str | Path, overrides: Sequence[str] = (), stage: str | None = None) -> Settings:
    """Read, override and validate a config; raise `ConfigError` with every problem found.

    `stage` is the one that will run, "autoencoder" or "ldm"; at present every rule holds for both.
    """
    path = Path(path)
    document = read_document(path)
    values = document.values
    if "version" in values:
        values = upgraded(values, path)
    values.setdefault("name", path.stem)
    alone = copy.deepcopy(values)
    overridden, problems = _apply(values, overrides)
    _spread(values)
    of_file: list[Problem] = []
    try:
        settings = validate(values)
    except ConfigError as error:
        for problem in sorted(error.problems, key=lambda problem: document.lines.get(problem.where, 0)):
            if any(overlap(problem.where, dotted) for dotted in overridden):
                problems.append(problem)
            else:
                of_file.append(problem)
    if of_file:
        by_override = (replace(problem, where=f"override {problem.where}") for problem in problems)
        with_lines = (_with_line(problem, document.lines) for problem in of_file)
        is_without = {*of_file} <= {*_problems(alone)}
        source = str(path) if is_without else f"{path} with the overrides"
        raise ConfigError([*by_override, *with_lines], source=source)
    if problems:
        raise ConfigError(problems, source="the overrides")
    return settings


def _problems(values: dict[str, Any]) -> tuple[Problem, ...]:
    _spread(values)
    try:
        validate(values)
    except ConfigError as error:
        return error.problems
    return ()


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides as values by dotted key; raise `ConfigError` for unknown keys and wrong values.

    Rules that involve several keys are left to `validate`, which sees the others.
    """
    values: dict[str, Any] = {}
    overridden, problems = _apply(values, overrides)
    _spread(values)
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        problems += _translate(error.errors(include_url=False), values).values()
    except ConfigError:
        pass  # a rule, whose other keys are not known yet
    if problems:
        raise ConfigError(problems, source="the overrides")
    return {dotted: look_up(values, dotted) for dotted in overridden}


def validate(values: dict[str, Any]) -> Settings:
    """Validate nested values; raise `ConfigError` with every problem, whether with one key or between several."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        found = _translate(error.errors(include_url=False), values)
        pruned = copy.deepcopy(values)
        for dotted in found:
            remove(pruned, dotted)
        problems = list(found.values())
        try:
            # pydantic runs the rules only once every key is valid, so run them again without the invalid keys.
            # A further ValidationError concerns something that is already reported.
            with suppress(ValidationError):
                Settings.model_validate(pruned, context={"failed": frozenset(found)})
        except ConfigError as rules:
            problems += rules.problems
        raise ConfigError(problems) from None


def stored(settings: Settings) -> dict[str, Any]:
    """Return the settings as checkpoints and weight files store them: every key, and the version."""
    return {"version": migrations.VERSION, **settings.model_dump(mode="json")}


def restored(values: dict[str, Any], where: object) -> Settings:
    """Return stored settings; raise `CheckpointError` unless they have every key and this version knows it."""
    values = upgraded(values, where)
    missing = [dotted for dotted, field in known_keys() if not is_section(field) and not has_key(values, dotted)]
    if missing:
        raise CheckpointError(f"{where}: its settings lack {missing[0]}; {migrations.WAY_OUT}")
    try:
        return validate(values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: its settings cannot be used; {migrations.WAY_OUT}: {error}") from None


def known_keys(kind: Any = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its field, each section before its keys."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        if is_section(field):
            yield from known_keys(field.annotation, f"{prefix}{name}.")


def default_text(field: Any) -> str:
    """Return the default of a key as YAML on one line."""
    default = field.get_default(call_default_factory=True)
    return yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True).split(
        "\n"
    )[0]


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Apply overrides to the values; return the keys that they set, and a problem for each that cannot be applied."""
    overridden, problems = [], []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.split(".")):
            remedy = "add = and a value" if not equals else "write a key before the =, such as data.num_workers"
            problems.append(Problem(_cut(override), "not an override", "allowed: section.key=value", remedy))
            continue
        try:
            value = parse_value(text)
        except ValueError as error:
            found = f"{_cut(repr(text))} is not a YAML value ({error})"
            problems.append(Problem(dotted, found, "", "correct or quote it"))
            continue
        try:
            assign(values, dotted, value)
        except KeyError:
            problems.append(Problem(dotted, "a key before the last is not a section", "", _suggest(dotted)))
        else:
            overridden.append(dotted)
    return overridden, problems


def _spread(values: dict[str, Any]) -> None:
    """Turn text such as 64x64x32 or 64,64,32 into a list wherever a list is expected."""
    for dotted, field in known_keys():
        text = look_up(values, dotted)
        if isinstance(text, str) and "tuple" in str(field.annotation):
            parts = re.split(r"\s*[x,\u00d7]\s*", text.strip())
            if len(parts) > 1 and all(map(_NUMBER.fullmatch, parts)):
                assign(values, dotted, [parse_value(part) for part in parts])


def _translate(errors: list[ErrorDetails], values: dict[str, Any]) -> dict[str, Problem]:
    """Turn pydantic's errors into problems, one per key."""
    grouped: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        grouped.setdefault(_dotted(error["loc"]), []).append(error)
    return {where: _problem(where, group, values) for where, group in grouped.items()}


def _dotted(location: tuple[int | str, ...]) -> str:
    """Return the config key of an error, without list positions and union members."""
    names = dict(known_keys())
    parts: list[str] = []
    for part in location:
        dotted = ".".join([*parts, str(part)])
        if parts and not is_section(names[".".join(parts)]):
            break
        parts.append(str(part))
        if dotted not in names:
            break
    return ".".join(parts)


def _problem(where: str, group: list[ErrorDetails], values: dict[str, Any]) -> Problem:
    fields = dict(known_keys())
    if where not in fields:
        # Letters of other alphabets can look like ASCII letters.
        found = "unknown key" if where.isascii() else f"unknown key, in ASCII {where!a}"
        return Problem(where, found, "", _suggest(where))
    field = fields[where]
    if is_section(field):
        return Problem(where, f"{look_up(values, where)!r} is not a section", "", "indent its keys below it")
    value = look_up(values, where)
    wrong = [error for error in group if not _is_echo(error, value)]
    lengths = [error for error in wrong if error["type"] in ("too_short", "too_long")]
    others = " or ".join(dict.fromkeys(_allowed(error) for error in wrong if error not in lengths))
    allowed = ", ".join(dict.fromkeys([*([others] if others else []), *map(_allowed, lengths)]))
    found = f"found {_shown(value)}"
    return Problem(where, found, f"allowed: {allowed}", f"for example {default_text(field)}")


def _is_echo(error: ErrorDetails, value: Any) -> bool:
    """Return whether a list counts as too short only because some of its entries are wrong, which is said anyway."""
    context = error.get("ctx") or {}
    return error["type"] == "too_short" and isinstance(value, list) and len(value) >= context.get("min_length", 0)


def _allowed(error: ErrorDetails) -> str:
    """Say in words which values a pydantic error would accept."""
    context: dict[str, Any] = dict(error.get("ctx") or {})
    kind = error["type"]
    words = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "tuple_type": "a list",
        "none_required": "null",
        "greater_than": f"above {context.get('gt')}",
        "greater_than_equal": f"at least {context.get('ge')}",
        "less_than": f"below {context.get('lt')}",
        "less_than_equal": f"at most {context.get('le')}",
        "literal_error": str(context.get("expected", "")).replace("'", ""),
        "too_short": f"at least {counted(context.get('min_length', 0), 'entry')}",
        "too_long": f"at most {counted(context.get('max_length', 0), 'entry')}",
        "string_pattern_mismatch": _PATTERNS.get(context.get("pattern", ""), f"text like {context.get('pattern')}"),
        "string_too_short": "non-empty text",
        "string_too_long": f"at most {counted(context.get('max_length', 0), 'character')}",
        "string_unicode": "valid Unicode text",
        "finite_number": "a finite number",
    }
    text = words.get(kind, error["msg"][:1].lower() + error["msg"][1:])
    in_list = any(isinstance(part, int) for part in error["loc"])
    return f"a list whose entries are each {text}" if in_list else text


def _suggest(where: str) -> str:
    """Suggest known keys for an unknown one: the same name in another section, else a similar name."""
    names = [name for name, _ in known_keys()]
    last = where.rsplit(".", 1)[-1]
    same = [name for name in names if name.rsplit(".", 1)[-1] == last]
    if same:
        return "did you mean " + " or ".join(same) + "?"
    parent = where.rsplit(".", 1)[0] + "." if "." in where else ""
    siblings = {n.removeprefix(parent): n for n in names if n.startswith(parent) and "." not in n.removeprefix(parent)}
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    if near:
        return f"did you mean {siblings[near[0]]}?"
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    near = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
    if near:
        return f"did you mean {by_last[near[0]]}?"
    return f"this section has: {', '.join(siblings)}" if siblings else "remove it"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return _cut(" ".join(repr(value).split()))
    return _cut(" ".join(yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).split("\n...")[0].split()))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _with_line(problem: Problem, lines: dict[str, int]) -> Problem:
    line = lines.get(problem.where)
    return problem if line is None else replace(problem, where=f"line {line}, {problem.where}")
