"""Models as JSON: the frozen dataclass that a writer fills is the one that a reader gets.

So a field that one of them renames is an error of the type checker, not a missing key in another process. Keys that a
model lacks are ignored, since a newer version may have written them. A field with a default may be missing; any other
missing key, and a value of another type, is an error.

Only the standard library: the processes with hot loops write these files, and pydantic would cost each of them 20 MB.

A field may be a scalar, a dataclass, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]` or `Any`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Convert = Callable[[Any], Any]

#: The types of JSON values that are valid for a scalar. `bool` is an `int` in Python only.
_SCALARS: Final[Mapping[Any, frozenset[type]]] = {
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
    str: frozenset({str}),
    NoneType: frozenset({NoneType}),
}


def encode(model: object) -> bytes:
    """The JSON of a model. The types of its fields have to be those that `decode` knows."""
    return json.dumps(model, default=_members).encode()


def plain(model: object) -> dict[str, Any]:
    """A model as the object that its JSON is, for output."""
    record: dict[str, Any] = json.loads(encode(model))
    return record


def decode(kind: type[_T], content: bytes) -> _T:
    """The model of this kind in `content`. Raises `ValueError` with the first field that is wrong."""
    try:
        return from_plain(kind, json.loads(content))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_plain(kind: type[_T], value: Any) -> _T:
    """The model of this kind in a parsed JSON value. Raises `ValueError`."""
    found: _T = _converter(cast("Any", kind))(value)
    return found


def _members(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _names(model.__class__)}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


@cache
def _converter(kind: Any) -> _Convert:
    """Checks a parsed JSON value, and makes it a value of this type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin in {Union, UnionType}:
        return _optional(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_converter(arguments[1]))
    if is_dataclass(kind):
        return _object(kind)
    return _scalar(kind)


def _scalar(kind: Any) -> _Convert:
    valid = _SCALARS[kind]

    def convert(value: Any) -> Any:
        if type(value) not in valid:
            raise ValueError(f"{kind.__name__} expected, not {type(value).__name__}")
        return value

    return convert


def _optional(arguments: tuple[Any, ...]) -> _Convert:
    (kind,) = (each for each in arguments if each is not NoneType)
    inner = _converter(kind)
    return lambda value: None if value is None else inner(value)


def _tuple(arguments: tuple[Any, ...]) -> _Convert:
    repeated = arguments[1:] == (...,)
    kinds = [_converter(each) for each in (arguments[:1] if repeated else arguments)]

    def convert(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not (repeated or len(value) == len(kinds)):
            raise ValueError("an array of another length, or none")
        converters = kinds * len(value) if repeated else kinds
        return tuple(inner(each) for inner, each in zip(converters, value, strict=True))

    return convert


def _mapping(inner: _Convert) -> _Convert:
    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("no object")  # noqa: TRY004  # the error of the data, not of the call
        return {name: inner(each) for name, each in value.items()}

    return convert


def _object(kind: Any) -> _Convert:
    types = get_type_hints(kind)
    converters = {each.name: _converter(types[each.name]) for each in fields(kind)}
    required = {
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    }

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__}: no object")  # noqa: TRY004  # as above
        if missing := required - value.keys():
            raise ValueError(f"{kind.__name__}: {min(missing)} is missing")
        given = {}
        for name, inner in converters.items():
            if name in value:
                try:
                    given[name] = inner(value[name])
                except ValueError as error:
                    raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        return kind(**given)

    return convert
