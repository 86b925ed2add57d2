"""Settings from a YAML file and the command line, where every unknown name is an error."""

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser


def parse_config(
    dataclass_types: Sequence[Any],
    args: Sequence[str] | None = None,
    *,
    default_config: str | Path | None = None,
    gives_way: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[Any, ...]:
    """Fills dataclasses from `--config FILE.yaml` and command-line options, which win over the file.

    A file may build on others, found from its own folder: with `base: size.yaml` or `base: [size.yaml, adamw.yaml]` it
    has all their settings; of equal keys the later file's counts, and the file's own before all.

    Args:
        dataclass_types: the dataclasses to fill; each field is a key of the file and an option.
        args: the command line; None: that of the process.
        default_config: the file to read when no `--config` is given.
        gives_way: an option, and the keys of the default file that it makes void.

    Returns:
        One instance of each dataclass.

    Raises:
        ValueError: an unknown key or option, with the nearest valid one, a file that cannot be read or builds on
            itself, or a value that the dataclasses refuse.
    """
    parser = HfArgumentParser(dataclass_types, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", help="YAML file with any of these settings; options win over it.")
    given = list(sys.argv[1:] if args is None else args)
    known = {action.dest for action in parser._actions} - {"help", "config"}
    chosen = _config_option(given)
    path = chosen or default_config
    settings = {} if path is None else read_settings(path, known)
    if chosen is None:
        for option in {word.split("=")[0].removeprefix("--") for word in given} & gives_way.keys():
            settings = {key: value for key, value in settings.items() if key not in gives_way[option]}
    nullable = {n for kind in dataclass_types for n, hint in get_type_hints(kind).items() if NoneType in get_args(hint)}
    for key, value in settings.items():
        if value is None and key not in nullable:
            raise ValueError(f"config={str(path)!r}: {key}=null is no value of it: give one, or leave the line out")
    # `--help` shows the settings of the file, and null has no spelling on the command line.
    parser.set_defaults(**settings)
    for action in parser._actions:
        action.required = action.required and action.dest not in settings
    try:
        # Through the parser as options, the values of a file are checked as those of the command line are.
        words = [word for key, value in settings.items() for word in _words(key, value)]
        *instances, _config, rest = parser.parse_args_into_dataclasses(
            [*words, *given],
            return_remaining_strings=True,
            look_for_args_file=False,
        )
    except (argparse.ArgumentError, json.JSONDecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if rest:
        name = rest[0].split("=")[0]
        raise ValueError(f"unknown argument {name!r}{_nearest(name.lstrip('-'), known, prefix='--')}")
    return tuple(instances)


def _words(key: str, value: Any) -> list[str]:
    """A setting as the command line would spell it."""
    if value is None or value == []:
        return []
    if isinstance(value, dict):
        return [f"--{key}", json.dumps(value)]
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


def _config_option(args: list[str]) -> str | None:
    for i, arg in enumerate(args):
        if arg == "--config" and i + 1 < len(args):
            return args[i + 1]
        if arg.startswith("--config="):
            return arg.removeprefix("--config=")
    return None


def read_settings(path: str | Path, known: set[str] | None = None, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings of a file and of those that it builds on, as `parse_config` takes them.

    Args:
        path: the YAML file.
        known: the keys that it may have; None: any.
        below: the files that build on this one.

    Raises:
        ValueError: see `parse_config`.
    """
    path = Path(path)
    found_in = f", a base of {str(below[-1])!r}," if below else ""
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config={str(path)!r}{found_in} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"config={str(path)!r}{found_in} must hold `key: value` lines")
    bases = settings.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ValueError(f"{path}: base={bases!r} must be the name of a YAML file or a list of names")
    for key in settings:
        if known is not None and key not in known:
            raise ValueError(f"{path}: unknown key {key!r}{_nearest(str(key), known | {'base'})}")
    merged: dict[str, Any] = {}
    for base in bases:
        file = path.parent / base
        if file.resolve() in [other.resolve() for other in (path, *below)]:
            raise ValueError(f"{path}: base={base!r} builds on this file itself, remove it from one of them")
        merged |= read_settings(file, known, (*below, path))
    return merged | settings


def _nearest(name: str, known: set[str], prefix: str = "") -> str:
    near = get_close_matches(name.replace("-", "_"), known, n=1)
    return f", did you mean {prefix + near[0]!r}?" if near else ": --help lists them all"
