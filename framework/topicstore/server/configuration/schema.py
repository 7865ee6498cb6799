"""The JSON Schema of the settings file, for completion and checks in editors.

msgspec's own schema is not used: it can't encode the defaults of durations and sizes, and allows null, which TOML
lacks.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
from msgspec import inspect

from topicstore.server.addresses import Address, Addresses
from topicstore.server.quantities import Duration, Period, Quota, Size
from topicstore.server.settings import ServerSettings

from .docstrings import about_settings, about_table
from .shown import plain

__all__ = ["json_schema"]

_QUANTITY = r"^\s*[0-9]+(\.[0-9]+)?\s*(%s)\s*$"
_TIME = _QUANTITY % "us|ms|s|min|h|d"
_BYTES = _QUANTITY % "B|kB|MB|GB|KiB|MiB|GiB"
_TEXTS: dict[type, dict[str, Any]] = {
    Path: {"minLength": 1},
    Address: {"pattern": r"^(\[.+\]|[^\[\]:\s]+):[0-9]{1,5}$"},
    Duration: {"pattern": _TIME},
    Period: {"pattern": f"{_TIME}|^infinity$"},
    Size: {"pattern": _BYTES},
    Quota: {"pattern": f"{_BYTES}|^infinity$"},
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
            return _table(kind, cls, tables)
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


def _table(kind: inspect.StructType, cls: type, tables: dict[str, Any]) -> dict[str, Any]:
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
