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

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from runtime.files import counted, shortened
from settings.errors import CheckpointError, ConfigError, Problem
from settings.root import Settings
from settings.section import FOLDER_NAME, WITHOUT_NUL, assign, has_key, is_section, look_up, overlap, remove, takes_list
from settings.yaml_reader import parse_value, read_document, value_text

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
    values.setdefault("name", path.stem)
    overridden, problems = _apply(values, overrides)
    of_file: list[Problem] = []
    try:
        settings = validate(values)
    except ConfigError as error:
        for problem in sorted(error.problems, key=lambda problem: document.lines.get(problem.where, 0)):
            if any(overlap(problem.where, dotted) for dotted in overridden):
                problems.append(problem)
            else:
                line = document.lines.get(problem.where)
                of_file.append(problem if line is None else replace(problem, where=f"line {line}, {problem.where}"))
    if of_file:
        by_override = (replace(problem, where=f"override {problem.where}") for problem in problems)
        source = f"{path} with the overrides" if overrides else str(path)
        raise ConfigError([*by_override, *of_file], source=source)
    if problems:
        raise ConfigError(problems, source="the overrides")
    return settings


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides as values by dotted key; raise `ConfigError` for unknown keys and wrong values.

    Rules that involve several keys are left to `validate`, which sees the others.
    """
    values: dict[str, Any] = {}
    overridden, problems = _apply(values, overrides)
    try:
        Settings.model_validate(_with_lists(values))
    except ValidationError as error:
        problems += _translate(error.errors(include_url=False), values).values()
    except ConfigError:
        pass  # a rule, whose other keys are not known yet
    if problems:
        raise ConfigError(problems, source="the overrides")
    return {dotted: look_up(_with_lists(values), dotted) for dotted in overridden}


def validate(values: dict[str, Any]) -> Settings:
    """Validate nested values; raise `ConfigError` with every problem, whether with one key or between several."""
    values = _with_lists(values)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        wrong = _translate(error.errors(include_url=False), values)
        pruned = copy.deepcopy(values)
        for dotted in wrong:
            remove(pruned, dotted)
        problems = list(wrong.values())
        try:
            # pydantic runs the rules only once every key is valid, so run them again without the invalid keys.
            # A further ValidationError concerns something that is already reported.
            with suppress(ValidationError):
                Settings.model_validate(pruned, context={"failed": frozenset(wrong)})
        except ConfigError as rules:
            problems += rules.problems
        raise ConfigError(problems) from None


def stored(settings: Settings) -> dict[str, Any]:
    """Return the settings as checkpoints and weight files store them: every key, so that a default may change."""
    return settings.model_dump(mode="json")


def restored(values: dict[str, Any], where: object) -> Settings:
    """Return stored settings; raise `CheckpointError` unless they have exactly the keys of this version."""
    way_out = "use the version of the program that wrote them, or start a new run"
    missing = [dotted for dotted, field in known_keys() if not is_section(field) and not has_key(values, dotted)]
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


def default_text(field: Any) -> str:
    """Return the default of a key as YAML on one line."""
    return value_text(field.get_default(call_default_factory=True))


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Apply overrides to the values; return the keys that they set, and a problem for each that cannot be applied."""
    overridden, problems = [], []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.split(".")):
            remedy = "add = and a value" if not equals else "write a key before the =, such as data.num_workers"
            problems.append(Problem(shortened(override), "not an override", "allowed: section.key=value", remedy))
            continue
        try:
            value = parse_value(text)
        except ValueError as error:
            found = f"{shortened(repr(text))} is not a YAML value ({error})"
            problems.append(Problem(dotted, found, "", "correct or quote it"))
            continue
        try:
            assign(values, dotted, value)
            overridden.append(dotted)
        except KeyError:
            problems.append(Problem(dotted, "a key before the last is not a section", "", _suggest(dotted)))
    return overridden, problems


def _with_lists(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with text such as 64x64x32 or 64,64,32 as a list wherever a list is expected."""
    values = copy.deepcopy(values)
    for dotted, field in known_keys():
        text = look_up(values, dotted)
        if isinstance(text, str) and takes_list(field.annotation):
            parts = re.split(r"\s*[x,\u00d7]\s*", text.strip())
            if len(parts) > 1 and all(map(_NUMBER.fullmatch, parts)):
                assign(values, dotted, [parse_value(part) for part in parts])
    return values


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
    wrong = [error for error in group if not _is_echo(error, value)]
    lengths = [error for error in wrong if error["type"] in ("too_short", "too_long")]
    others = " or ".join(dict.fromkeys(_allowed(error) for error in wrong if error not in lengths))
    allowed = ", ".join(dict.fromkeys([*([others] if others else []), *map(_allowed, lengths)]))
    found = f"found {shortened(repr(value) if isinstance(value, str) else value_text(value, allow_unicode=True))}"
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
    parent, _, last = where.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return "did you mean " + " or ".join(same) + "?"
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names)}
    for choices, cutoff in ((siblings, 0.6), (anywhere, 0.7)):
        near = difflib.get_close_matches(last, choices, n=1, cutoff=cutoff)
        if near:
            return f"did you mean {choices[near[0]]}?"
    return f"this section has: {', '.join(siblings)}" if siblings else "remove it"
