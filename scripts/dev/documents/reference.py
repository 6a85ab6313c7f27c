"""The documents generated from the settings: the schema for editors, and the configuration reference."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from settings.load import default_text, known_keys
from settings.root import Settings
from settings.section import is_section


def json_schema() -> str:
    """Return the JSON schema of a config, which editors use to complete and check keys."""
    return json.dumps(Settings.model_json_schema(), indent=2) + "\n"


def configuration_reference() -> str:
    """Return docs/configuration.md: every key with its default, its promise and its one-line description."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the settings by `python -m scripts.dev.documents`; do not edit by hand.",
        "",
        "Every key has a default, so a config may contain only what differs. Set keys in YAML, or as overrides at",
        "the end of a command: `python train_autoencoder.py --config configs/high_res.yaml data.num_workers=4`.",
        "",
        "- **same mathematics**: affects memory and speed but no gradient; may change when a run resumes.",
        "- **different mathematics**: affects what is learned; a run refuses to resume after such a change.",
        "- **free**: affects neither, for example how long to train and what to log.",
    ]
    for dotted, field in known_keys():
        if is_section(field):
            lines += ["", f"## `{dotted}`", "", str(field.description), "", *_TABLE_HEAD]
            lines += [_row(f"{dotted}.{name}", inner) for name, inner in field.annotation.model_fields.items()]
    top = [_row(dotted, field) for dotted, field in known_keys() if "." not in dotted]
    first = lines.index("", 10)
    lines[first:first] = ["", "## Top level", "", *_TABLE_HEAD, *top]
    return "\n".join(lines) + "\n"


_TABLE_HEAD = ["| key | values | default | promise | what it does |", "|---|---|---|---|---|"]


def _row(dotted: str, field: Any) -> str:
    if is_section(field):
        return f"| `{dotted.rsplit('.', 1)[-1]}` | section | | | {field.description} See `{dotted}` below. |"
    promise = field.json_schema_extra["promise"]
    name = dotted.rsplit(".", 1)[-1]
    return f"| `{name}` | {_values(field.annotation)} | `{default_text(field)}` | {promise} | {field.description} |"


def _values(annotation: Any) -> str:
    """Return the allowed values of a key in words."""
    names = {bool: "true, false", int: "whole number", float: "number", str: "text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is tuple:
        element = _values(arguments[0])
        return f"list of {element}s" if element.endswith("number") else f"list of {element}"
    if hasattr(annotation, "__metadata__"):
        return _values(arguments[0])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, arguments))
    return " or ".join(_values(argument) for argument in arguments)
