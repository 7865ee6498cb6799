"""Changes of the settings file by a program: its comments, order and formatting stay."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from topicstore.server.replaced_file import ReplacedFile

from .model import Rule, SettingsError

if TYPE_CHECKING:
    import tomlkit

__all__ = ["replace_rules", "restore"]


def replace_rules(path: Path, rules: Sequence[Rule]) -> str:
    """Replace the access rules in a settings file; return the file's text before the change.

    The file is replaced atomically, and keeps its owner and permissions. Raises `SettingsError`.
    """
    before: list[str] = []

    def change(text: str) -> str:
        before.append(text)
        return _with_rules(path, text, rules)

    _file(path).rewrite(change)
    return before[0]


def restore(path: Path, text: str) -> None:
    """Replace the text of a settings file. Raises `SettingsError`."""
    _file(path).rewrite(lambda _: text)


def _file(path: Path) -> ReplacedFile:
    return ReplacedFile(path, "settings", SettingsError)


def _with_rules(path: Path, text: str, rules: Sequence[Rule]) -> str:
    """Return the text of a settings file with other access rules."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        found = _edited(tomlkit.parse(text), rules)
    except TOMLKitError as bad:
        raise SettingsError(f"{path}: its rules can't be changed by a program ({bad}): edit it") from bad
    if not _differs_in_rules_only(text, found, rules):
        raise SettingsError(f"{path}: its rules can't be changed by a program, because of its form: edit it")
    return found


def _edited(document: tomlkit.TOMLDocument, rules: Sequence[Rule]) -> str:
    import tomlkit

    section: Any = document.get("authorization")
    if section is None:
        section = document.setdefault("authorization", tomlkit.table(is_super_table=True))
    if "rules" in section:
        del section["rules"]
    if rules:
        tables = tomlkit.aot()
        for rule in rules:
            table = tomlkit.table()
            for field in msgspec.structs.fields(Rule):
                value = getattr(rule, field.name)
                if value != field.default:
                    table.add(field.name, list(value) if isinstance(value, tuple) else value)
            tables.append(table)
        section["rules"] = tables
    return tomlkit.dumps(document)


def _differs_in_rules_only(before: str, after: str, rules: Sequence[Rule]) -> bool:
    """Return whether the text of a settings file has these rules, and otherwise the same settings as before."""
    try:
        documents = [tomllib.loads(before), tomllib.loads(after)]
    except tomllib.TOMLDecodeError:  # tomlkit writes tables within an inline table in an invalid form
        return False
    [_, found] = [document.setdefault("authorization", {}).pop("rules", []) for document in documents]
    return documents[0] == documents[1] and msgspec.convert(found, tuple[Rule, ...]) == tuple(rules)
