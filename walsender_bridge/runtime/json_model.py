"""Models as JSON: the frozen dataclass that a writer fills is the one that a reader gets.

So a field that one of them renames is an error of the type checker, not a missing key in another process. A field with a
default may be missing; any other missing key, and a value of another type, is an error. Keys that a model lacks are ignored,
since a newer version may have written them; `strict` refuses them. Errors name the field, never its value, which may be a
password.

Only the standard library: pydantic would cost each process with a hot loop 20 MB, and 0.2 s of CPU at its start, for which
commits may wait.

A field may be a scalar, `Path`, `Literal`, a dataclass, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, a `NamedTuple` (in JSON
an array), `Mapping[str, X]` or `Any`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
#: Checks a parsed JSON value, and makes it a value of the model; the second argument is its place, `gate.names[0]`.
_Convert = Callable[[Any, str], Any]

#: The types of JSON values that are valid for a scalar. `bool` is an `int` in Python only.
_SCALARS: Final[Mapping[Any, frozenset[type]]] = {
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
    str: frozenset({str}),
    Path: frozenset({str}),
}


def encode(model: object) -> bytes:
    """The JSON of a model. A field of another type than those above raises `TypeError`."""
    return json.dumps(model, default=_plain, separators=(",", ":")).encode()


def plain(model: object) -> dict[str, Any]:
    """A model as the object that its JSON is, for output."""
    record: dict[str, Any] = json.loads(encode(model))
    return record


def decode(kind: type[_T], content: bytes, *, strict: bool = False) -> _T:
    """The model of this kind in `content`. Raises `ValueError` with the first field that is wrong."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("the document is not valid JSON") from None
    return from_plain(kind, value, strict=strict)


def from_plain(kind: type[_T], value: Any, *, strict: bool = False) -> _T:
    """The model of this kind in a parsed JSON value. Raises `ValueError`."""
    found: _T = _converter(cast("Any", kind), strict)(value, "")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not a type of a model's field")
    return {name: getattr(value, name) for name in _names(value.__class__)}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


@cache
def _converter(kind: Any, strict: bool) -> _Convert:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, _: value
    if origin is Literal:
        return _literal(arguments)
    if origin in {Union, UnionType}:
        return _optional(arguments, strict)
    if origin is tuple:
        return _tuple(arguments, strict)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_converter(arguments[1], strict))
    if is_dataclass(kind):
        return _object(kind, strict)
    if issubclass(kind, tuple):
        return _named_tuple(kind, strict)
    return _scalar(kind)


def _scalar(kind: Any) -> _Convert:
    valid = _SCALARS[kind]

    def convert(value: Any, at: str) -> Any:
        if type(value) not in valid:
            raise _mistyped(at, kind.__name__)
        try:
            return kind(value)
        except OverflowError:
            raise _mistyped(at, kind.__name__) from None

    return convert


def _literal(valid: tuple[Any, ...]) -> _Convert:
    def convert(value: Any, at: str) -> Any:
        if not any(type(value) is type(each) and value == each for each in valid):
            raise ValueError(f"{at or 'the document'} is none of {', '.join(map(str, valid))}")
        return value

    return convert


def _optional(arguments: tuple[Any, ...], strict: bool) -> _Convert:
    (kind,) = (each for each in arguments if each is not NoneType)
    inner = _converter(kind, strict)
    return lambda value, at: None if value is None else inner(value, at)


def _tuple(arguments: tuple[Any, ...], strict: bool) -> _Convert:
    repeated = arguments[1:] == (...,)
    kinds = [_converter(each, strict) for each in (arguments[:1] if repeated else arguments)]

    def convert(value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not (repeated or len(value) == len(kinds)):
            raise _mistyped(at, "array" if repeated else f"array of {len(kinds)}")
        converters = kinds * len(value) if repeated else kinds
        pairs = enumerate(zip(converters, value, strict=True))
        return tuple(inner(each, f"{at}[{n}]") for n, (inner, each) in pairs)

    return convert


def _named_tuple(kind: Any, strict: bool) -> _Convert:
    types = get_type_hints(kind)
    inner = _tuple(tuple(types[name] for name in kind._fields), strict)
    return lambda value, at: kind(*inner(value, at))


def _mapping(inner: _Convert) -> _Convert:
    def convert(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _mistyped(at, "object")
        return {name: inner(each, _path(at, name)) for name, each in value.items()}

    return convert


def _object(kind: Any, strict: bool) -> _Convert:
    types = get_type_hints(kind)
    converters = {each.name: _converter(types[each.name], strict) for each in fields(kind)}
    required = [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    ]

    def convert(value: Any, at: str) -> Any:
        if not isinstance(value, dict):
            raise _mistyped(at, "object")
        if strict and (unknown := value.keys() - converters.keys()):
            raise ValueError(f"{_path(at, min(unknown))[:80]} is unknown")
        for name in required:
            if name not in value:
                raise ValueError(f"{_path(at, name)} is missing")
        given = value.keys() & converters.keys()
        return kind(**{name: converters[name](value[name], _path(at, name)) for name in given})

    return convert


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _mistyped(at: str, kind: str) -> ValueError:
    return ValueError(f"{at or 'the document'} is not of type {kind}")
