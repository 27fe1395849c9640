"""Settings of a run from a YAML file: each key known, of its type, and told with its line if not.

A task's settings are a frozen dataclass. Its annotations say what a value may be: `int`, `float`,
`bool`, `str`, `Path`, `Literal[…]`, `dict`, and any of these or None; a field's `metadata` may hold
the least value, made with `at_least`.
"""

import argparse
import dataclasses
import types
import typing
from pathlib import Path

import yaml


class ConfigError(ValueError):
    """A file of settings that cannot be used; the message names the file, the line and the key."""


def at_least(least, default):
    """A dataclass field whose value is `least` or more."""
    return dataclasses.field(default=default, metadata={"at_least": least})


def option(default, told, least=None):
    """A dataclass field that is an option of a command, too; `told` says what it is for."""
    metadata = {"help": told} | ({} if least is None else {"at_least": least})
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser, settings):
    """Give `parser`, argparse's, an option for each field of the dataclass `settings`.

    One that is not given is None. Values are held to what a file of settings is held to.
    """
    for field in dataclasses.fields(settings):
        name = f"--{field.name.replace('_', '-')}"
        told = field.metadata["help"]
        if "(" not in told and field.default is not None and not isinstance(field.default, bool):
            told += f" (default: {field.default})"
        if bool in _kinds(typing.get_type_hints(settings)[field.name]):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, help=told)
        else:
            parser.add_argument(name, type=_of_text(settings, field.name), help=told)


def _of_text(settings, key):
    kinds = _kinds(typing.get_type_hints(settings)[key])
    plain = any(kind in (str, Path) or typing.get_origin(kind) is typing.Literal for kind in kinds)

    def value(text):
        try:
            return converted(settings, key, text if plain else yaml.safe_load(text))
        except (ConfigError, yaml.YAMLError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def given(options, settings):
    """{field: value} of the dataclass `settings` for the options that were given."""
    names = (field.name for field in dataclasses.fields(settings))
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def read(path, settings):
    """`settings`, a dataclass, with the values of the YAML file at `path`.

    Raises ConfigError where the file cannot be read or is no mapping, and for a key that is unknown
    or comes twice, and for a value of another type, each with its line.
    """
    path = Path(path)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: this is no YAML: {error.problem}") from None
    if root is None:
        return settings()
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}, line 1: expected lines of `key: value`")
    fields = {field.name: field for field in dataclasses.fields(settings)}
    found = {}
    for key_node, node in root.value:
        key, where = str(key_node.value), f"{path}, line {key_node.start_mark.line + 1}"
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}; there are {', '.join(fields)}")
        if key in found:
            raise ConfigError(f"{where}: {key} is given twice")
        try:
            value = yaml.constructor.SafeConstructor().construct_document(node)
            found[key] = converted(settings, key, value)
        except (ConfigError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: {error}") from None
    return settings(**found)


def converted(settings, key, value):
    """`value` as field `key` of the dataclass `settings` wants it; raises ConfigError."""
    wanted = typing.get_type_hints(settings)[key]
    field = next(f for f in dataclasses.fields(settings) if f.name == key)
    kinds = _kinds(wanted)
    for kind in kinds:
        found = _as_kind(value, kind)
        if found is not _NO:
            break
    else:
        told = " or ".join(map(_spelling, kinds))
        raise ConfigError(f"{key} must be {told}, not {value!r}")
    least = field.metadata.get("at_least")
    if least is not None and found is not None and found < least:
        raise ConfigError(f"{key} must be {least} or more, not {found}")
    return found


_NO = object()


def _kinds(wanted):
    """The kinds of which a value may be one."""
    union = typing.get_origin(wanted) in (types.UnionType, typing.Union)
    return typing.get_args(wanted) if union else (wanted,)


def _as_kind(value, kind):
    """`value` as `kind`, or _NO. YAML takes 1e-3 for text: here it is a number."""
    if kind in (type(None), None):
        return None if value is None else _NO
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if typing.get_origin(kind) is typing.Literal:
        return value if value in typing.get_args(kind) else _NO
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _NO
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return _NO
        try:
            return float(value)
        except ValueError:
            return _NO
    if kind is Path:
        return Path(value) if isinstance(value, str) and value else _NO
    return value if isinstance(value, kind) else _NO


def _spelling(kind):
    if kind in (type(None), None):
        return "null"
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text",
            Path: "a path", dict: "lines of `key: value`"}[kind]  # fmt: skip
