"""Reading a configuration: YAML, overrides, and one-line explanations of what is wrong."""

from __future__ import annotations

import re
import types
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from torchrec_ext.command.errors import UserError
from torchrec_ext.command.sections import Section
from torchrec_ext.spelling import did_you_mean

Kind = TypeVar("Kind", bound=Section)

QUOTE = "'"


def load_config(kind: type[Kind], path: str, overrides: Sequence[str] = ()) -> Kind:
    """Read and check a configuration file.

    Args:
        kind: What it holds.
        path: A YAML file.
        overrides: Texts such as ``optimizer.l1_reg=0``, applied in order before the check; the
            value is YAML.

    Raises:
        UserError: If the file is missing, is not YAML, or its content is not a legal configuration.
            One line names every wrong key with its path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    content = parse_yaml(text, path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of keys to values at the top level")
    for override in overrides:
        apply_override(content, override)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, kind)}") from error


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; duplicate keys are errors and ``1e-3`` is a number.

    Raises:
        UserError: If the text is not YAML; names ``source``, line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{source}{place}: not valid YAML: {reason}") from error


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one value of a parsed configuration in place.

    Args:
        content: The mapping read from the file.
        override: ``path.to.key=value``.

    Raises:
        UserError: If the text has no ``=``, or the path runs through a value that is no mapping.
    """
    path, equals, value = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise UserError(f"--set {override}: expected path.to.key=value")
    section: dict[str, Any] = content
    for depth, key in enumerate(keys[:-1], start=1):
        below = section.setdefault(key, {})
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {'.'.join(keys[:depth])} is not a section")
        section = below
    section[keys[-1]] = parse_yaml(value, f"--set {override}")


def dump_config(config: Section) -> str:
    """Write a configuration with every default as YAML that ``load_config`` reads back."""
    content = config.model_dump(mode="json", exclude_none=True)
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False)


def explain(error: ValidationError, kind: type[Section]) -> str:
    """Describe every problem of a configuration on one line."""
    return "; ".join(_explain_one(details, kind) for details in error.errors())


def _explain_one(details: ErrorDetails, kind: type[Section]) -> str:
    path, section = _walk(details["loc"], kind)
    context = details.get("ctx", {})
    problem = details["type"]
    if problem == "section_key":
        return f"{_join(path, context['key'])}: {context['reason']}"
    if problem == "extra_forbidden":
        legal = list(section.model_fields) if section is not None else []
        parent, _, key = path.rpartition(".")
        hint = did_you_mean(key, legal, _join(parent, ""))
        return f"{path}: unknown key{hint or '; the legal ones are ' + ', '.join(legal)}"
    if problem == "missing":
        return f"{path}: missing"
    if problem == "union_tag_not_found":
        return f"{_join(path, context['discriminator'].strip(QUOTE))}: missing"
    if problem == "union_tag_invalid":
        legal = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        hint = did_you_mean(context["tag"], legal)
        key = _join(path, context["discriminator"].strip(QUOTE))
        return f"{key}: {context['tag']!r} is not one of {', '.join(legal)}{hint}"
    message = details["msg"]
    if problem == "hyperparameter":
        return f"{path}: {message}"
    return f"{path}: {message[0].lower()}{message[1:]}, got {_shorten(details['input'])}"


def _walk(
    location: tuple[int | str, ...], root: type[Section]
) -> tuple[str, type[BaseModel] | None]:
    """Turn pydantic's location into the path in the file and the section that holds its end.

    Pydantic puts the tag of a union (``movielens-100k``) into the location; the file has none.
    """
    section: type[BaseModel] | None = root
    holder: type[BaseModel] | None = root
    branches: dict[str, type[BaseModel]] = {}
    path = ""
    for step in location:
        if isinstance(step, str) and step in branches:
            section, branches = branches[step], {}
            continue
        if isinstance(step, int):  # an item of a list, whose section the list's key has given
            path = f"{path}[{step}]"
            continue
        path = _join(path, step)
        holder = section
        section, branches = _below(section, step)
    return path, holder


def _below(
    section: type[BaseModel] | None, step: str
) -> tuple[type[BaseModel] | None, dict[str, type[BaseModel]]]:
    """Give the section below a key, or the sections it may be by their tags."""
    field = section.model_fields.get(step) if section is not None else None
    if field is None:
        return None, {}
    sections = _sections(field.annotation)
    if isinstance(field.discriminator, str):
        tags = {
            get_args(candidate.model_fields[field.discriminator].annotation)[0]: candidate
            for candidate in sections
        }
        return None, tags
    return (sections[0] if sections else None), {}


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated, list):
        return [section for part in get_args(annotation) for section in _sections(part)]
    return []


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shorten(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would take the last of two equal keys and read 1e-3 as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes the texts that :class:`_Loader` would read as numbers."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )
