"""Representations of the settings: the settings in force, a commented default file, and a JSON Schema.

All are generated from the settings' classes, defaults and docstrings. The JSON Schema is for completion and checks in
editors. msgspec's own schema is not used: it can't encode the defaults of durations and sizes, and allows null, which
TOML lacks.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator, Mapping
from inspect import getdoc, getsource
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import tomlkit
from msgspec import inspect

from topicstore.contract.quantities import DURATIONS, INFINITY, SIZES

from .load import Configuration, read_settings
from .model import ServerSettings
from .units import Address, Addresses, Duration, Period, Quota, Size

__all__ = [
    "about_settings",
    "about_table",
    "chosen_file",
    "default_file",
    "json_schema",
    "leaves",
    "plain",
    "shown",
    "shown_as_toml",
    "written",
]


def about_table(cls: type) -> str:
    """Return a class's docstring without the leading name of the table."""
    text = re.sub(r"^(Section|Table|One of) ``[^`]+``[^:;.]*[:;.] *", "", getdoc(cls) or "")
    return text[:1].upper() + text[1:]


@functools.cache
def about_settings(cls: type) -> Mapping[str, str]:
    """Return the docstrings of a class's fields, by field name."""
    [body] = ast.parse(textwrap.dedent(getsource(cls))).body
    found = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for one, after in pairwise(statements):
        match one, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = re.sub(r"\s+", " ", text).strip()
            case _:
                pass
    return found


_SECRET = re.compile(r"passw|passphrase|secret|credential|api_?key|(^|_)token$", re.IGNORECASE)
_HIDDEN = "***"


def shown(settings: ServerSettings) -> dict[str, Any]:
    """Return settings as nested dicts of TOML values; secrets are ``***``."""
    found: dict[str, Any] = plain(settings)
    return found


def plain(settings: Any) -> Any:
    """Return a setting, or a table of settings, as TOML values; secrets are ``***``."""
    if isinstance(settings, msgspec.Struct):
        settings = msgspec.structs.asdict(settings)
    if isinstance(settings, Mapping):
        return {key: _HIDDEN if _is_secret(key, one) else plain(one) for key, one in settings.items()}
    if isinstance(settings, Addresses) and not isinstance(settings, Address):
        settings = settings.all
    if isinstance(settings, (tuple, list)):
        return [plain(one) for one in settings]
    return str(settings) if isinstance(settings, (Duration, Size, Path, str)) else settings


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and _SECRET.search(key) is not None


def leaves(table: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of each setting of a document; an empty table counts as a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*place, key))
        else:
            yield (*place, key), value


def shown_as_toml(configuration: Configuration) -> str:
    """Return the settings in force as TOML, with their origins as comments; unset ones are only comments."""
    document = tomlkit.document()
    _fill(document, shown(configuration.settings), (), configuration)
    return tomlkit.dumps(document)


def _fill(table: Any, found: Mapping[str, Any], place: tuple[str, ...], configuration: Configuration) -> None:
    tables = {key: value for key, value in found.items() if isinstance(value, Mapping) and value}
    for key, value in found.items():
        if key in tables:
            continue
        if value is None:
            table.add(tomlkit.comment(f"{key} is not set"))
        else:
            item = tomlkit.item(_inline(value))
            item.comment(configuration.origin((*place, key)))
            table.add(key, item)
    for key, value in tables.items():
        inner = tomlkit.table()
        _fill(inner, value, (*place, key), configuration)
        table.add(key, inner)


def _inline(value: Any) -> Any:
    """Return a TOML value in which tables are inline, and None values are omitted."""
    if isinstance(value, list):
        array = tomlkit.array()
        for one in value:
            array.append(_inline(one))
        return array
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for key, one in value.items():
            if one is not None:
                table.add(key, _inline(one))
        return table
    return value


def written(value: Any) -> str:
    """Return a value as TOML in one line."""
    text: str = tomlkit.item(_inline(value)).as_string()
    return text


_TEXTS: dict[type, dict[str, Any]] = {
    Path: {"minLength": 1},
    Address: {"pattern": r"^(\[.+\]|[^\[\]:\s]+):[0-9]{1,5}$"},
    Duration: {"pattern": DURATIONS},
    Period: {"pattern": f"{DURATIONS}|^{INFINITY}$"},
    Size: {"pattern": SIZES},
    Quota: {"pattern": f"{SIZES}|^{INFINITY}$"},
}
"""The schemas of types that TOML doesn't have."""


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings file, with a description of each setting."""
    tables: dict[str, Any] = {}
    whole = _schema(inspect.type_info(ServerSettings), tables)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "$defs": tables}


def _schema(kind: inspect.Type, tables: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; schemas of tables are added to ``tables``."""
    match kind:
        case inspect.UnionType(types=types):
            found = [_schema(one, tables) for one in types if not isinstance(one, inspect.NoneType)]
            return found[0] if len(found) == 1 else {"anyOf": found}
        case inspect.StructType(cls=cls):
            return _table_schema(kind, cls, tables)
        case inspect.DictType(value_type=inner, min_length=least):
            return {"type": "object", "additionalProperties": _schema(inner, tables), "minProperties": least or 0}
        case inspect.VarTupleType(item_type=inner, min_length=least):
            return {"type": "array", "items": _schema(inner, tables), "minItems": least or 0}
        case inspect.CustomType(cls=cls) if cls is Addresses:
            address = _schema(inspect.type_info(Address), tables)
            return {"anyOf": [address, {"type": "array", "items": address, "minItems": 1}]}
        case inspect.CustomType(cls=cls):
            return {"type": "string", **_TEXTS[cls]}
        case _:
            return _plain(kind)


def _plain(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.LiteralType(values=values):
            return {"enum": list(values)}
        case inspect.IntType(ge=least, le=most):
            limits = {"minimum": least, "maximum": most}
            return {"type": "integer", **{name: limit for name, limit in limits.items() if limit is not None}}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.StrType():
            return {"type": "string"}
        case inspect.AnyType():
            return {}
        case _:
            raise NotImplementedError(f"settings hold no {kind}")


def _table_schema(kind: inspect.StructType, cls: type, tables: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in tables:
        table: dict[str, Any] = {"type": "object", "description": about_table(cls), "additionalProperties": False}
        tables[cls.__name__] = table
        about, properties = about_settings(cls), dict[str, Any]()
        for field in kind.fields:
            properties[field.encode_name] = one = _schema(field.type, tables)
            if field.name in about:
                one["description"] = about[field.name].replace("``", "")
            if not isinstance(field.default, (msgspec.Struct, NoneType, type(msgspec.NODEFAULT))):
                one["default"] = plain(field.default)
        table["properties"] = properties
        table["required"] = [field.encode_name for field in kind.fields if field.required]
    return {"$ref": f"#/$defs/{cls.__name__}"}


_WIDTH = 100
_EXAMPLES: dict[type, str] = {Path: "FILE", Duration: "1h", Period: "30d", Size: "8MB", Quota: "100GB"}
"""Example values, by type, for settings without a default."""
_OWN_EXAMPLES: dict[str, Any] = {
    "backend": "rocksdb",
    "batch_size": 500,
    "client_id": "ID",
    "http_address": "http://127.0.0.1:18083",
    "idle_poll_interval": "1s",
    "max_queued": 100_000,
    "proxies": ["10.1.0.0/16"],
    "publish_rate": 1_000,
    "renew_streams_interval": "1s",
    "response_information": "answers/%c",
    "site": "hall-1",
    "topics": ["sensors/%u/#"],
    "url": "s3://bucket/plant",
    "zone": "NAME",
}
"""Example values for single settings, which take precedence."""


def default_file() -> str:
    """Return a settings file with the settings of a server without a file, and with comments.

    Comments begin with ``# ``. Settings without a default are commented out by ``#`` without a space, with an example
    value. The file stays valid if each such ``#`` is removed.
    """
    settings = read_settings(None, {})
    lines = [
        *_comment(
            "The settings of 'topicstore serve --config FILE', all with their defaults. After a '#' without a space "
            "stands what by default is not set, with an example: take the '#' away to set it. Each may also be set by "
            "the environment, as TOPICSTORE__LIMITS__CONNECTIONS=500. Durations and sizes have a unit: '30m', "
            "'1d12h', '8MB'. Paths are relative to this file."
        ),
        "",
        *_comment(
            "Kept messages: a message is stored if a rule of persistence matches its topic, or its publisher requests "
            "it. It is kept as long as 'keep' or message_retention_period say, by default for ever. Any other message "
            "is stored only if a session waits for it. It is removed once no session needs it and it is older than "
            "delivered_retention_period, by default ten minutes."
        ),
        *_table(ServerSettings, settings, (), active=True),
    ]
    return "\n".join(lines).strip() + "\n"


def chosen_file(settings: ServerSettings) -> str:
    """Return a settings file with the settings that differ from their defaults, and with comments.

    Tables in a list, such as rules, are complete.
    """
    lines = [
        *_comment(
            "The settings of 'topicstore serve --config FILE'. Those that are not here have their defaults: "
            "'topicstore config init' prints all of them. Paths are relative to this file."
        ),
        *_table(ServerSettings, settings, (), active=True, whole=False),
    ]
    return "\n".join(lines) + "\n"


def _table(
    cls: type, value: Any, place: tuple[str, ...], *, active: bool, header: str = "[{}]", whole: bool = True
) -> Iterator[str]:
    """Yield the lines of a table; unless ``active``, they are commented out; unless ``whole``, without defaults."""
    mark, docs = "" if active else "#", about_settings(cls)
    whole = whole or header == _LISTED
    if place:
        yield ""
        yield from _comment(about_table(cls))
        yield mark + header.format(".".join(place))
    tables = []
    for field in msgspec.structs.fields(cls):
        found = getattr(value, field.name, None)
        usual = _default(field)
        if not whole and found == usual:
            continue
        within = _tables_of(field, found, place)
        if within is not None:
            tables += within
            continue
        yield from _comment(docs.get(field.name, ""))
        if found is None:
            yield f"#{field.name} = {written(_example(field) if usual is None else plain(usual))}"
        else:
            yield f"{mark}{field.name} = {written(plain(found))}"
    for one, inner, at, form in tables:
        yield from _table(one, inner, at, active=active and inner is not None, header=form, whole=whole)


_LISTED = "[[{}]]"
"""The header of a table in a list."""


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field; None if it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _tables_of(
    field: msgspec.structs.FieldInfo, found: Any, place: tuple[str, ...]
) -> list[tuple[type, Any, tuple[str, ...], str]] | None:
    """Return the tables of a field, each with class, value, keys and header format; None if it has none."""
    at = (*place, field.name)
    for kind in _kinds(field.type):
        if isinstance(kind, inspect.StructType):
            return [(kind.cls, found, at, "[{}]")]
        if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
            named = dict(found) if found else {"NAME": None}
            return [(kind.value_type.cls, one, (*at, name), "[{}]") for name, one in named.items()]
        if isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
            return [(kind.item_type.cls, one, at, _LISTED) for one in found or [None]]
    return None


def _kinds(kind: Any) -> tuple[inspect.Type, ...]:
    found = inspect.type_info(kind)
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _example(field: msgspec.structs.FieldInfo) -> Any:
    if field.name in _OWN_EXAMPLES:
        return _OWN_EXAMPLES[field.name]
    for one in _kinds(field.type):
        if isinstance(one, inspect.LiteralType):
            return one.values[0]
        if isinstance(one, inspect.IntType):
            return one.ge or 1
        if isinstance(one, inspect.BoolType):
            return True
        if isinstance(one, inspect.VarTupleType):
            return ["TEXT"]
        if isinstance(one, inspect.DictType):
            return {}
        if isinstance(one, inspect.CustomType):
            return _EXAMPLES.get(one.cls, "127.0.0.1:1883")
    return "TEXT"


def _comment(text: str) -> list[str]:
    plain = re.sub(r"\s+", " ", text.replace("``", "")).strip()
    return [f"# {line}" for line in textwrap.wrap(plain, _WIDTH)]
