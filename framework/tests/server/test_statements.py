"""A table lists the tests of each statement of the standard, and the reason if a statement has no test."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import topicstore
from topicstore_conformance.mqtt.statements import statements_of

HERE = Path(__file__).parent
TABLE = Path(topicstore.__file__).parent / "server" / "README.md"
ROW = re.compile(r"^\| \[MQTT-([\d.]+-\d+)\] \| (.*) \|$", re.MULTILINE)
PACKETS = re.compile(r"^\| ([\d.]+-\d+) \| [\d.–-]+ \| [^|]+ \| `test", re.MULTILINE)
"""The numbers in the README's table about packets, which `protocol/test_statements_about_packets.py` checks."""
STATEMENTS = 251
"""The number of statements in MQTT 5, appendix B."""
TEST = re.compile(r"`(test_\w+)`")


def named() -> dict[str, list[str]]:
    """Return the names of the tests of each statement, by the statement's number."""
    found: dict[str, list[str]] = {}
    for file in [HERE / f"test_statements_{about}.py" for about in ("connecting", "publishing", "subscribing")]:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in vars(module).items():
            for number in statements_of(test) if name.startswith("test_") else ():
                found.setdefault(number, []).append(name)
    return found


def test_the_table_names_the_tests_of_each_statement() -> None:
    rows = {number: set(TEST.findall(text)) for number, text in ROW.findall(TABLE.read_text())}
    expected = {number: set(names) for number, names in named().items()}
    for number, names in expected.items():
        assert names <= rows.get(number, set()), f"[MQTT-{number}] is tested by {sorted(names)}"
    ours = {name for names in expected.values() for name in names}
    for number, names in rows.items():
        assert names & ours == expected.get(number, set()), f"[MQTT-{number}]"


def test_a_statement_without_a_test_says_why() -> None:
    """Each statement about the server has a test, and the table gives a reason for each statement without a test."""
    rows = ROW.findall(TABLE.read_text())
    assert len(rows) == len({number for number, _ in rows})
    assert len({number for number, _ in rows} | set(PACKETS.findall(TABLE.read_text()))) == STATEMENTS
    assert [number for number, text in rows if not (TEST.search(text) or len(text) > 10)] == []
