"""The report as an HTML file: its validity, self-containment and contents. `test_in_a_browser` checks its layout."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("altair", reason='needs altair: pip install "topicstore[bench]"')
pytest.importorskip("vl_convert", reason='needs vl-convert-python: pip install "topicstore[bench]"')

from topicstore_benchmarks.report.page import render, write_report
from topicstore_benchmarks.report.run import load

RunMaker = Callable[..., Path]
VOID = {"meta", "br"}


class Document(HTMLParser):
    """A parsed page: its tags, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.unclosed.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def document(wide_run: Path) -> Document:
    return Document(write_report(wide_run).read_text(encoding="utf-8"))


def text(run: Path) -> str:
    """Return the page without its charts, which take most of the time to render."""
    return render(load(run), ())


def test_it_loads_nothing(document: Document) -> None:
    """The page has no script and no external resource, and its content security policy forbids both."""
    assert [] == document.all("link", "img", "image", "iframe", "object", "embed", "base", "script")
    assert [] == [one for _, one in document.tags if "src" in one]
    assert all(str(one["href"]).startswith("#") for one in document.all("a"))
    (policy,) = [str(one["content"]) for one in document.all("meta") if one.get("http-equiv")]
    assert "default-src 'none'; style-src 'unsafe-inline'" == policy


def test_elements_close_and_ids_are_unique(document: Document) -> None:
    assert [] == document.unclosed
    ids = Counter(str(one["id"]) for _, one in document.tags if "id" in one)
    assert [] == [name for name, count in ids.items() if count > 1]
    assert {str(one["href"])[1:] for one in document.all("a")} <= set(ids)


def test_headings_are_in_order(document: Document) -> None:
    levels = [int(tag[1]) for tag, _ in document.tags if tag in ("h1", "h2", "h3", "h4")]

    assert 1 == levels[0] == levels.count(1)
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_tables_have_captions_and_each_question_has_a_picture(document: Document) -> None:
    """Every table has a caption, and every criterion has charts that show the medians as text."""
    assert len(document.all("table")) == len(document.all("caption"))
    assert 10 == len(document.all("figure")) <= len([one for one in document.all("svg") if one["width"]])
    assert {"SQLite", "block on rocksdb", "RocksDB alone"} <= set(document.texts)
    assert any(re.fullmatch(r"[\d.]+ [kM] → [\d.]+ [kM]", one) for one in document.texts)


def test_what_names_hold_is_text_not_markup(make_run: RunMaker) -> None:
    """Names and reasons, which may come from users' files, are escaped."""
    evil = "</style><img src=x onerror=alert(1)>"

    def edit(row: dict[str, Any]) -> dict[str, Any]:
        reason = evil if row["reason"] else None
        return row | {"workload": evil, "reason": reason, "run": evil, "settings": json.dumps({evil: evil})}

    found = Document(text(make_run(repetitions=2, edit=edit)))
    assert [] == found.all("img")
    assert evil in found.texts


def test_it_names_the_command_that_repeats_it(make_run: RunMaker) -> None:
    run = make_run(repetitions=2)
    (run / "run.json").write_text(json.dumps({"command": ["bench", "run", "a run", "--messages", "5"]}))

    assert "topicstore bench run &#39;a run&#39; --messages 5" in text(run)


def test_it_says_plainly_where_a_peer_is_ahead(make_run: RunMaker) -> None:
    said = text(make_run(repetitions=2, changes={("SQLite", "store"): 30.0}))

    assert re.search(
        r'<td data-workload="fleet" class="peer"><strong>SQLite</strong><br>\s+'
        r'<span class="muted">[^<]+× \([^<]+\) block on',
        said,
    )


def test_it_needs_no_run_json_no_limits_and_no_peers(make_run: RunMaker) -> None:
    def ours(row: dict[str, Any]) -> dict[str, Any] | None:
        return row if row["kind"] == "topicstore" else None

    run = make_run(repetitions=2, edit=ours)
    (run / "run.json").unlink()

    assert "No peer took part" in text(run)


def test_without_topicstore_nothing_is_compared(make_run: RunMaker) -> None:
    run = make_run(repetitions=2, edit=lambda row: row if row["contender"] == "Parquet" else None)

    assert "there is nothing to compare it with" in text(run)


def test_a_run_without_values_is_refused_and_an_old_report_stays(make_run: RunMaker) -> None:
    run = make_run(repetitions=2, edit=lambda row: row | {"status": "failed", "value": None})
    (run / "report.html").write_text("old")

    with pytest.raises(ValueError, match="no measured value"):
        write_report(run)
    assert "old" == (run / "report.html").read_text()
    with pytest.raises(FileNotFoundError):
        write_report(run / "absent")


def test_settings_that_durability_changes_are_distinguished(wide_run: Path) -> None:
    said = text(wide_run)

    assert "synchronous: NORMAL (commit), FULL (sync)" in said
    assert "library 1.2<" in said


def text_of(html: str) -> str:
    """Return the text of HTML without tags, with single spaces."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_it_counts_measured_contenders(make_run: RunMaker) -> None:
    """The page counts measured and skipped contenders separately; the rows and ``run.json`` name skipped ones."""
    run = make_run(repetitions=2)
    assert "10 contenders ( 1 left out ), 1 workload," in text_of(text(run))
    (run / "run.json").write_text(json.dumps({"skipped_contenders": {"RabbitMQ streams": "x", "postgres": "y"}}))
    assert "10 contenders ( 2 left out ), 1 workload," in text_of(text(run))


def test_a_repetition_without_values_is_none(make_run: RunMaker) -> None:
    """A repetition that was left out for lack of time is not counted as a repetition."""

    def left_out(row: dict[str, Any]) -> dict[str, Any]:
        late = {"status": "skipped", "reason": "the time for the run was over", "value": None}
        return row | late if row["repetition"] == 2 else row

    said = text(make_run(repetitions=2, edit=left_out))
    assert ", 1 repetition," in said
    assert "the time for the run was over" in said
    assert "Everything was measured once, so that nothing is clear." in said


def test_long_times_have_no_prefix_of_thousands(make_run: RunMaker) -> None:
    """Long times are shown without a metric prefix."""

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"value": row["value"] * 2_000} if row["unit"] in ("ms", "s") else row

    said = text(make_run(repetitions=2, edit=slow))
    assert not re.search(r"\d [kMG] m?s\b", said)


def test_it_says_that_a_run_is_not_finished(make_run: RunMaker) -> None:
    """The page reports an unfinished run with its numbers of measured and planned trials.

    Trials with a durability that no contender supports are not counted.
    """
    run = make_run(repetitions=2)
    plan = {"workloads": [{"name": "fleet", "values": {}}], "repetitions": 3, "durabilities": ["commit", "sync"]}
    for durabilities, says in ((["commit"], "2 of 3 trials"), (["commit", "sync"], "2 of 6 trials")):
        asked = {"plan": {**plan, "contenders": [{"durabilities": durabilities}]}}
        (run / "run.json").write_text(json.dumps(asked))
        assert f"<strong>Not finished:</strong> {says}" in text(run)
    given = {**plan, "contenders": [{"durabilities": ["commit"]}], "settings": {"budget": 240.0}}
    (run / "run.json").write_text(json.dumps({"plan": given}))
    said = "trials of a workload, a durability and a repetition were measured so far, in the 240 seconds"
    assert said in text(run)
    finished = {"plan": {**plan, "repetitions": 2, "contenders": [{"durabilities": ["commit"]}]}}
    (run / "run.json").write_text(json.dumps(finished))
    assert "Not finished" not in text(run)


def test_the_machine_is_named_before_the_verdict(make_run: RunMaker) -> None:
    """The reader sees the processor, cores and memory before the first figure."""
    said = text(make_run(repetitions=2))

    assert said.index("Made Processor 3000") < said.index('id="verdict"')


def test_it_says_where_the_default_pair_loses_to_sqlite(make_run: RunMaker) -> None:
    """Each criterion for which SQLite is ahead of block on RocksDB has a line; without any, a line says "nowhere"."""
    lost = text_of(text(make_run(name="lost", repetitions=3, changes={("SQLite", "store"): 30.0})))
    won = text_of(text(make_run(name="won", repetitions=3)))

    assert re.search(r"loses to SQLite Store , fleet, commit: SQLite is [\d.]+× \([\d.]+ to [\d.]+\) better\.", lost)
    assert "loses to SQLite Nowhere in this run." in won
