"""Examples for the help of each command, by the command's name; a subcommand is named after its group: ``bans add``."""

from __future__ import annotations

from collections.abc import Mapping

import click

__all__ = ["EXAMPLES", "show_examples"]

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "bans": ("bans add address 192.0.2.0/24 --for 1d", "bans list"),
    "bans add": ("bans add client flooder --for 10m --reason 'floods the server'",),
    "bans list": ("bans list",),
    "bans remove": ("bans remove client flooder",),
    "bench": ("bench run results --preset quick", "bench report results"),
    "bench compare": ("bench compare before after",),
    "bench compare-commits": ("bench compare-commits HEAD~1",),
    "bench figures": ("bench figures",),
    "bench list": ("bench list",),
    "bench report": ("bench report results",),
    "bench run": ("bench run results --contender 'rocksdb/*'",),
    "checkpoint": ("checkpoint data backup",),
    "clients": ("clients data 'fleet/#' --sort messages",),
    "cluster": ("cluster begin data s3://bucket/plant",),
    "cluster begin": ("cluster begin data s3://bucket/plant",),
    "compact": ("compact data",),
    "config": ("config init server.toml --tls --user alice --keep 30d", "config check --config server.toml"),
    "config certificate": ("config certificate --config server.toml --renew",),
    "config check": ("config check --config server.toml",),
    "config schema": ("config schema > server.schema.json",),
    "config show": ("config show --config server.toml",),
    "conformance": ("conformance --backend rocksdb --layout block --quick",),
    "conformance mqtt": ("conformance mqtt localhost:1883",),
    "create": ("create data", "create history --timestamps message --shards 4"),
    "delete": ("delete data 'debug/#' --until -7d", "delete data 'test/#' --yes"),
    "demo": ("demo",),
    "ds": ("ds info",),
    "ds forget": ("ds forget 0123456789abcdef",),
    "ds info": ("ds info data",),
    "ds join": ("ds join messages 0123456789abcdef",),
    "ds leave": ("ds leave messages 0123456789abcdef",),
    "ds set-replicas": ("ds set-replicas messages 0123456789abcdef",),
    "explain": ("explain data 'fleet/+/+/speed' --start -1d",),
    "export": ("export data cold", "export data cold --drop"),
    "generations": ("generations data",),
    "generations add": ("generations add data",),
    "generations drop": ("generations drop data 1",),
    "generations list": ("generations list data",),
    "import": ("import data messages.jsonl", "import data sensors.csv --map payload=value --set topic=hall/co2"),
    "info": ("info data",),
    "latest": ("latest data 'fleet/+/+/speed'",),
    "learned-topics": ("learned-topics data --filter 'fleet/#'",),
    "plugins": ("plugins", "plugins new sled"),
    "queue": ("queue list data",),
    "queue drop": ("queue drop data forward",),
    "queue list": ("queue list data",),
    "queue read": ("queue read data forward",),
    "recommend": ("recommend messages.jsonl",),
    "retained": ("retained data 'home/#'",),
    "retention": ("retention data", "retention set data --max-age 30d"),
    "retention run": ("retention run data",),
    "retention show": ("retention show data",),
    "rules": ("rules add allow 'home/#' --user ann --config server.toml", "rules list --config server.toml"),
    "rules add": ("rules add allow 'home/%c/#' --user ann --config server.toml",),
    "rules list": ("rules list --config server.toml",),
    "rules remove": ("rules remove 2 --config server.toml",),
    "sessions": ("sessions data", "sessions show data display"),
    "sessions expire": ("sessions expire data display",),
    "sessions groups": ("sessions groups data",),
    "sessions kick": ("sessions kick data display",),
    "sessions list": ("sessions list data",),
    "sessions show": ("sessions show data display",),
    "sql": ("sql data 'select topic, count(*) from messages group by topic'",),
    "streams": ("streams data 'fleet/#'",),
    "tokens": ("tokens add dashboard --scope read",),
    "tokens add": ("tokens add dashboard --scope read",),
    "tokens list": ("tokens list",),
    "tokens revoke": ("tokens revoke dashboard",),
    "topics": ("topics data 'fleet/#' --sort messages",),
    "users": ("users add ann",),
    "users add": ("users add ann --file users",),
    "users list": ("users list --file users",),
    "users remove": ("users remove ann --file users",),
    "verify": ("verify data",),
}
"""The arguments of the program. Commands whose docstring has examples are left out."""


def show_examples(name: str, command: click.Command) -> None:
    """Add the examples to the help of a command and of its subcommands."""
    for path, one in [(name, command), *((f"{name} {sub}", one) for sub, one in _subcommands(command).items())]:
        found = EXAMPLES.get(path)
        if found and "Example" not in (one.epilog or ""):
            lines = "".join(f"\n  topicstore {example}" for example in found)
            examples = f"\b\nExample{'s' if len(found) > 1 else ''}:{lines}\n"
            one.epilog = f"{examples}\n{one.epilog}" if one.epilog else examples


def _subcommands(command: click.Command) -> Mapping[str, click.Command]:
    return command.commands if isinstance(command, click.Group) else {}
