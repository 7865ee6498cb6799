"""The page in a real browser, wide and narrow, light and dark: contents, layout, accessibility."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore_conformance.conditions.browser import MEASURES, SIZES, Open, need_browser
from topicstore_conformance.mqtt.embedded import serving_http
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.wire import Will
from topicstore_conformance.subjects import datasets

need_browser()
pytest.importorskip("plotly", reason='needs plotly: pip install "topicstore[server]"')

from playwright.sync_api import BrowserContext, Page, expect  # noqa: E402 - after the check that it is installed

_VIEWS = ["now", "topics", "replay", "sessions"]
_OTHER_VIEWS = ["retained", "storage", "publish"]
_HOSTILE = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """A database with positions of buses, hostile texts and binary payloads.

    The positions are real ones if the data set is installed.
    """
    with ts.open(tmp_path_factory.mktemp("page") / "db", backend="memory", shards=2) as db:
        db.store(_buses()[:2_000])
        db.add_generation()
        db.store(_buses()[2_000:])
        db.store(
            [
                ts.Message(f"hostile/{_HOSTILE}", json.dumps({_HOSTILE: _HOSTILE, "n": n}).encode(), _HOSTILE)
                for n in range(3)
            ]
        )
        db.store(
            [ts.Message("binary/blob", bytes(range(256)), "c"), ts.Message("huge/number", b'{"n": 9007199254740993}')]
        )
        db.store(
            [
                ts.Message(f"rooms/{room}", b'{"ts": 1764400000, "humid": %d, "sensor_id": 7}' % n, "hub")
                for n, room in enumerate(("attic", "cellar", "hall"))
            ]
        )
        db.publish([ts.Message("retained/door", b'{"open": true}', "hub", 1, retain=True)])
        db.retention.set(max_age=30 * 86_400, filters={"debug/#": 3_600})
        yield db


def _buses() -> list[ts.Message]:
    if datasets.why_absent("bus.parquet") is None:
        rows = datasets.load("bus").slice(0, 4_000).to_pylist()
        return [ts.Message(row["topic"], row["payload"], row["client_id"], qos=row["qos"]) for row in rows]
    return [
        ts.Message(
            f"capmetro/vp/{n % 40}/{n % 400}",
            json.dumps({"speed": n % 31 + 0.5, "position": {"lat": 30 + n / 1e5, "lon": -97.7}}).encode(),
            f"bus-{n % 400}",
            qos=1,
        )
        for n in range(4_000)
    ]


@pytest.fixture(scope="module")
def server(store: ts.Database) -> Iterator[Server]:
    session = store.sessions.open("late <b>client</b>", expiry_interval=None)
    session.subscribe("capmetro/#", start=0)
    session.disconnect()
    quiet = store.sessions.open("quiet/client", expiry_interval=86_400)
    quiet.subscribe("rooms/#", start=None)
    quiet.disconnect()
    with serving_http(store) as server:
        yield server


@attrs.frozen
class Opened:
    """The page in a window, with its console messages, errors, failed responses and requests to other servers."""

    page: Page
    url: str
    said: list[str]

    @classmethod
    def of(cls, context: BrowserContext, url: str) -> Opened:
        page, said = context.new_page(), []
        page.on("console", lambda message: said.append(f"{message.text} ({message.location})"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith((url, "blob:", "data:")) else said.append(one.url))
        page.on("response", lambda one: said.append(f"{one.status} {one.url}") if one.status >= 400 else None)
        return cls(page, url, said)

    def see(self, view: str) -> Page:
        """Open a view, and return the page when the view shows its data."""
        self.page.goto(f"{self.url}/#{view}")
        self.page.evaluate(MEASURES)
        ready = {
            "now": "#figures dd >> nth=0, #generations tbody tr, #lag svg",
            "topics": "#tree [role=treeitem] >> nth=0",
            "replay": "#rows li >> nth=0",
            "sessions": "#session-table tbody tr >> nth=0",
            "retained": "#retained-table tbody tr >> nth=0",
            "storage": "#all-generations tbody tr >> nth=0, #outlook tbody tr >> nth=0, #limits dd >> nth=0",
            "publish": "#publish-form button:enabled",
        }
        for selector in ready[view.partition("?")[0]].split(", "):
            self.page.locator(selector).first.wait_for()
        for plot in self.page.locator(".plot:visible").all():
            plot.locator("svg.main-svg").first.wait_for()
        return self.page


@pytest.fixture(scope="module", params=SIZES, ids=str)
def window(request: pytest.FixtureRequest, chromium: Open, server: Server) -> Opened:
    """The page in a window of one size and colour scheme; tests open the views that they need."""
    return Opened.of(chromium(*request.param), server.urls_of_http[0])


@pytest.fixture(scope="module")
def context(chromium: Open) -> BrowserContext:
    return chromium(1440, "light", timezone_id="UTC")


@pytest.fixture
def opened(context: BrowserContext, server: Server) -> Iterator[Opened]:
    """A new page; the fixture fails at the end of the test if the page has reported an error."""
    opened = Opened.of(context, server.urls_of_http[0])
    yield opened
    opened.page.close()
    assert [] == opened.said


@pytest.mark.parametrize("view", [*_VIEWS, *(pytest.param(view, marks=pytest.mark.slow) for view in _OTHER_VIEWS)])
def test_nothing_is_cut_faint_or_overlaps(window: Opened, view: str) -> None:
    """No text is cut, overlapped or too faint; the contrast is at least 4.5, as WCAG 2.2 level AA requires."""
    page = window.see(view)

    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [] == page.evaluate("measures.cut()")
    assert [] == page.evaluate("measures.overlapping()")
    assert [] == page.evaluate("measures.colliding()")
    assert [] == page.evaluate("measures.faintTexts(4.5)")
    assert [] == window.said


def test_a_click_through_all_views(opened: Opened) -> None:
    page = opened.see("now")
    for name in ("Topics", "Replay", "Sessions", "Retained", "Storage", "Publish", "Now"):
        page.get_by_role("tab", name=name).click()
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        expect(page).to_have_title(f"{name} · topicstore")
        assert 1 == page.locator("[role=tabpanel]:visible").count()


def test_now_shows_what_the_database_says(opened: Opened, store: ts.Database) -> None:
    page = opened.see("now")

    expect(page.locator("#database")).to_have_text(str(store.path))
    assert len(store.generations()) == page.locator("#generations tbody tr").count()
    assert len(store.info().shards) == page.locator("#shards tbody tr").count()
    expect(page.locator("#figures")).to_contain_text(f"{store.info().messages:,}")


def test_replay_unfolds_payloads_and_draws_a_field(opened: Opened) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    row = page.locator("#rows li").first

    expect(row.locator(".topic")).to_contain_text("capmetro/vp/")
    expect(row.locator(".unfolded dt").filter(has_text="speed")).to_be_visible()
    page.select_option("#field", "speed")
    expect(page).to_have_url(re.compile("field=speed"))
    expect(page.locator("#values .scatterlayer .trace").first).to_be_attached()
    assert "capmetro/vp/" in page.locator("#values-legend").inner_text()


def test_the_pages_of_a_replay_are_bounded_and_together_all(opened: Opened, store: ts.Database) -> None:
    page = opened.see("replay?filter=capmetro/%23&order=oldest")
    rows = page.locator("#rows li")

    expect(rows).to_have_count(100)
    page.click("#more")
    expect(rows).to_have_count(200)
    shown = [text.split(" ")[0] for text in page.locator("#rows .topic").all_inner_texts()]
    assert [message.topic for message in store.replay("capmetro/#", limit=200)] == shown


def test_a_filter_and_times_are_in_the_address(opened: Opened) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    page.fill("#replay-form [name=filter]", "binary/+")
    page.fill("#replay-form [name=start]", "-2h")
    page.keyboard.press("Enter")

    expect(page.locator("#rows li")).to_have_count(1)
    expect(page.locator("#rows .payload")).to_contain_text("256 bytes: 00 01 02")
    assert page.url.endswith("filter=binary%2F%2B&start=-2h&by=position&order=newest")
    page.reload()
    expect(page.locator("#replay-form [name=filter]")).to_have_value("binary/+")
    expect(page.locator("#rows li")).to_have_count(1)


def test_integers_are_shown_as_they_are_written(opened: Opened) -> None:
    page = opened.see("replay?filter=huge/%23")

    expect(page.locator("#rows .unfolded dd")).to_have_text("9007199254740993")


def test_a_part_of_the_histogram_can_be_looked_into(opened: Opened) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    drag = page.locator("#histogram .nsewdrag").bounding_box()
    assert drag is not None
    page.mouse.move(drag["x"] + drag["width"] * 0.25, drag["y"] + 20)
    page.mouse.down()
    page.mouse.move(drag["x"] + drag["width"] * 0.5, drag["y"] + 22, steps=4)
    page.mouse.move(drag["x"] + drag["width"] * 0.75, drag["y"] + 24, steps=4)
    page.mouse.up()

    expect(page).to_have_url(re.compile(r"start=\d+&until=\d+"))


def test_an_export_has_everything(opened: Opened, store: ts.Database) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON lines").click()
    lines = download.value.path().read_text().splitlines()

    assert "messages.jsonl" == download.value.suggested_filename
    assert [message.topic for message in store.replay("capmetro/#")] == [json.loads(line)["topic"] for line in lines]


def test_explain_says_what_is_read(opened: Opened) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    page.locator("#explain summary").click()

    expect(page.locator("#explained")).to_contain_text("4,000")
    expect(page.locator("#explained-slabs tbody tr").first).to_be_visible()


def test_live_messages_appear_by_themselves(opened: Opened, store: ts.Database) -> None:
    page = opened.see("replay?filter=capmetro/%23")
    page.fill("#replay-form [name=filter]", "live/#")
    with page.expect_response(re.compile("/messages/tail")):
        page.get_by_role("button", name="Live").click()
    store.store([ts.Message("live/a", b'{"value": 21.5}', "c")])

    expect(page.locator("#rows li")).to_have_count(1)
    expect(page.locator("#rows li").first).to_contain_text("21.5")
    page.get_by_role("button", name="Live").click()
    expect(page.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "false")


def test_topics_open_level_by_level_and_lead_to_their_messages(opened: Opened) -> None:
    page = opened.see("topics")
    item = page.get_by_role("treeitem", name=re.compile("^capmetro,"))
    item.locator("> div").click()
    inner = item.get_by_role("treeitem", name=re.compile("^vp,"))
    expect(inner).to_be_visible()
    inner.locator("> div").hover()
    inner.locator("> div a").click()

    expect(page).to_have_url(re.compile("#replay.*filter=capmetro%2Fvp%2F%23"))


def test_patterns_that_were_learned_are_listed(opened: Opened) -> None:
    page = opened.see("topics")

    expect(page.locator("#learned tbody tr").first).to_contain_text("+")


def test_sessions_say_who_is_behind(opened: Opened) -> None:
    page = opened.see("sessions")
    row = page.locator("#session-table tbody tr").filter(has_text="late <b>client</b>")

    expect(row).to_contain_text("4,000")
    expect(row).to_contain_text("away")


def test_all_sessions_are_shown_whether_they_are_behind_or_not(opened: Opened) -> None:
    """The page lists all sessions, those with waiting messages first."""
    page = opened.see("sessions")
    shown = page.locator("#session-table tbody th").all_inner_texts()

    assert ["late <b>client</b>", "quiet/client"] == [name for name in shown if name in {*shown[:1], "quiet/client"}]
    expect(page.locator("#session-figures")).to_contain_text("Sessions")


def test_a_session_is_shown_in_detail_and_can_be_ended(opened: Opened, store: ts.Database) -> None:
    """The details of a session show its subscriptions and where it is stored; Expire removes the session for good."""
    session = store.sessions.open("ending/client", expiry_interval=7_200)
    session.subscribe("rooms/+", qos=1)
    session.disconnect()
    page = opened.see("sessions?sort=client_id")
    page.get_by_role("link", name="ending/client").click()
    detail = page.locator("#session-detail")

    expect(detail.locator("#session-subscriptions tbody")).to_contain_text("rooms/+")
    expect(detail.locator("#session-facts")).to_contain_text("on disk")
    detail.get_by_role("button", name="Expire ending/client").click()
    page.get_by_role("button", name="Expire it").click()
    expect(detail).to_be_hidden()
    assert "ending/client" not in store.sessions


def test_a_connected_client_shows_its_address(opened: Opened, server: Server) -> None:
    with RawClient(int(server.addresses[0].rpartition(":")[2])) as client:
        client.connect("here/now", will=Will(topic="rooms/gone"))
        page = opened.see("sessions?client=here%2Fnow")
        facts = page.locator("#session-facts")

        expect(facts).to_contain_text("connected from 127.0.0.1:")
        expect(facts).to_contain_text("at once when the connection is lost")


def test_topics_show_their_last_value(opened: Opened) -> None:
    """A search opens the branches down to the topics it finds, each with its last value; a click shows it whole."""
    page = opened.see("topics?search=cellar")
    topic = page.get_by_role("treeitem", name=re.compile("^cellar,"))

    expect(topic.locator(".value")).to_have_text('{"ts": 1764400000, "humid": 1, "sensor_id": 7}')
    expect(topic.locator(".age")).to_contain_text(re.compile("ago|just now"))
    topic.locator("> div").click()
    expect(page.locator("#topic-name")).to_have_text("rooms/cellar")
    expect(page.locator("#topic-payload dt").nth(1)).to_have_text("humid")
    page.locator("#topic-message .payload-form").select_option("raw")
    expect(page.locator("#topic-payload pre")).to_have_text('{"ts": 1764400000, "humid": 1, "sensor_id": 7}')
    page.locator("#topic-message .payload-form").select_option("pretty")


def test_values_are_drawn_and_times_and_ids_are_not(opened: Opened) -> None:
    """The chart first shows a measured value, offers no field of times, and states which messages are drawn."""
    page = opened.see("replay?filter=rooms/%23")

    expect(page.locator("#field")).to_have_value("humid")
    assert ["humid", "sensor_id"] == page.locator("#field option").all_inner_texts()
    expect(page.locator("#values-summary")).to_contain_text("all 3 messages, 20")
    page = opened.see("replay?filter=capmetro/%23")
    expect(page.locator("#values-summary")).to_contain_text("only the newest 1,000 messages, 20")
    expect(page.locator("#values-summary")).to_contain_text("6 topics")
    assert 6 == page.locator("#values-legend .key").count()


def test_an_axis_begins_with_the_messages(opened: Opened) -> None:
    """A range that begins in 2001 is drawn from the first message on, and a range without messages isn't drawn."""
    page = opened.see("replay?filter=rooms/%23&start=978307200000000")
    expect(page.locator("#histogram-summary")).to_contain_text(re.compile("3 messages, stored from 20"))
    assert "2001-" not in page.locator("#view-replay").inner_text()
    page.fill("#replay-form [name=filter]", "nothing/here")
    page.keyboard.press("Enter")

    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#view-replay .plot:visible")).to_have_count(0)


_TICKS = """async () => {
  const { timeTicks } = await import('/page/time_axis.js');
  const found = [];
  for (const width of [290, 700]) {
    for (let span = 50; span < 3e12; span *= 1.37) {
      const [values, texts] = timeTicks(1764e9, 1764e9 + span, width);
      const apart = values.slice(1).map((at, number) => (at - values[number]) / span * width);
      const [after, before] = [values[0] - 1764e9, 1764e9 + span - values.at(-1)];
      found.push([Math.min(...apart, width), values.length, after, before, texts[0]]);
    }
  }
  return found;
}"""


def test_the_marks_of_an_axis_of_time_have_room(opened: Opened) -> None:
    """For any time range from milliseconds to decades, the axis has a tick, all ticks in the range, 70 pixels apart."""
    for apart, number, after, before, text in opened.see("publish").evaluate(_TICKS):
        assert apart >= 70
        assert number >= 1
        assert min(after, before) >= 0
        assert text


def test_times_are_shown_and_read_in_one_zone(chromium: Open, store: ts.Database, server: Server) -> None:
    """All times are in the zone that the page names; a typed time is read in it, and UTC can be chosen instead."""
    opened = Opened.of(chromium(1440, "light", timezone_id="Asia/Tokyo"), server.urls_of_http[0])
    page = opened.see("replay?filter=rooms/hall")
    stored = dt.datetime.fromtimestamp(store.latest("rooms/hall")[0].timestamp / 1e6, dt.UTC)
    japan = stored.astimezone(dt.timezone(dt.timedelta(hours=9)))
    when = page.locator("#rows .when").first

    expect(page.locator("#zone option:checked")).to_have_text("Tokyo")
    expect(page.locator("#replay-times")).to_contain_text("Asia/Tokyo")
    expect(when).to_have_text(f"{japan:%Y-%m-%d %H:%M:%S}.{japan.microsecond // 1000:03d}")
    typed = page.locator("#replay-form [name=start]")
    typed.fill(f"{japan:%Y-%m-%d %H:%M}")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"start={int(stored.replace(second=0, microsecond=0).timestamp())}000000"))
    expect(page.locator("#rows li")).to_have_count(1)
    page.select_option("#zone", "utc")
    expect(when).to_have_text(f"{stored:%Y-%m-%d %H:%M:%S}.{stored.microsecond // 1000:03d}")
    expect(typed).to_have_value(f"{stored:%Y-%m-%d %H:%M}:00")
    assert [] == opened.said


def test_now_says_what_clients_have_sent_and_received(tmp_path: Path, context: BrowserContext) -> None:
    """The totals of publishes in and out are those that the clients count themselves, whatever is stored."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server:
        port = int(server.addresses[0].rpartition(":")[2])
        with RawClient(port) as publisher, RawClient(port) as first, RawClient(port) as second:
            for name, client in (("p", publisher), ("a", first), ("b", second)):
                client.connect(name)
            first.subscribe("counted/#")
            second.subscribe("counted/even/#")
            for n in range(40):
                publisher.publish(f"counted/{'odd' if n % 2 else 'even'}/{n}", b"x", qos=n % 3)
            received = len(first.publishes(40)) + len(second.publishes(20))
            opened = Opened.of(context, server.urls_of_http[0])
            opened.page.goto(f"{opened.url}/#now")
            figures = opened.page.locator("#figures")

            assert 60 == received
            expect(figures.locator(".in")).to_contain_text("40 in all")
            expect(figures.locator(".out")).to_contain_text("60 in all")
            expect(figures).to_contain_text(re.compile("counted .*(ago|just now)"))
            opened.page.close()
            assert [] == opened.said


def test_an_empty_server_says_the_next_step(tmp_path: Path, context: BrowserContext) -> None:
    """Each view of an empty server names the next step; the suggested rule and message can be entered there."""
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server:
        opened = Opened.of(context, server.urls_of_http[0])
        page = opened.page
        page.goto(f"{opened.url}/#now")
        expect(page.locator("#first-command")).to_contain_text(
            f"mosquitto_pub -h 127.0.0.1 -p {server.addresses[0][10:]}"
        )
        page.get_by_role("link", name="Add a rule").click()
        page.get_by_role("button", name="Add the rule").click()
        expect(page.locator("#rules tbody")).to_contain_text("#")
        for view, says in (("topics", "#no-topics"), ("replay", "#nothing"), ("sessions", "#no-sessions")):
            page.get_by_role("tab", name=view.capitalize()).click()
            expect(page.locator(says)).to_be_visible()
        page.get_by_role("tab", name="Publish").click()
        page.get_by_label("Topic", exact=True).fill("hello/world")
        page.get_by_label("Payload", exact=True).fill("Hello")
        page.get_by_role("button", name="Publish").click()
        expect(page.locator("#published")).to_contain_text("hello/world: stored.")
        page.get_by_role("link", name="See it").click()
        expect(page.locator("#rows .payload")).to_have_text("Hello")
        page.get_by_role("tab", name="Now").click()
        expect(page.locator("#figures")).to_contain_text("Messages")
        expect(page.locator("#beginning")).to_be_hidden()
        page.close()
        assert ["Hello"] == [message.payload.decode() for message in db.replay("#")]
        assert [] == opened.said


def test_retained_messages_are_shown_and_cleared(opened: Opened, store: ts.Database) -> None:
    page = opened.see("retained?filter=retained/%23")
    expect(page.locator("#retained-table tbody")).to_contain_text("open")
    page.get_by_role("button", name="Clear retained/door").click()
    page.get_by_role("button", name="Clear it").click()
    expect(page.locator("#retained-nothing")).to_be_visible()

    assert [] == store.retained("retained/#")
    store.publish([ts.Message("retained/door", b'{"open": true}', "hub", 1, retain=True)])


def test_storage_says_what_is_kept_for_how_long(opened: Opened, store: ts.Database) -> None:
    page = opened.see("storage")

    expect(page.locator("#limits")).to_contain_text("30 d")
    expect(page.locator("#limits")).to_contain_text("debug/#")
    assert len(store.retention.outlook()) == page.locator("#outlook tbody tr").count()
    assert len(store.generations()) == page.locator("#all-generations tbody tr").count()


@pytest.mark.slow
def test_the_pages_of_the_interface_are_linked_and_dark(chromium: Open, server: Server) -> None:
    """The page links the OpenAPI page, which has the same colour scheme."""
    opened = Opened.of(chromium(1440, "dark"), server.urls_of_http[0])
    page = opened.see("publish")
    page.get_by_role("link", name="The HTTP interface").click()
    page.locator(".opblock").first.wait_for()
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)")

    assert max(ground[:3]) < 80
    expect(page.locator(".opblock-summary-description").first).to_contain_text(" ")
    assert [] == [one for one in opened.said if "schema" in one]


def test_a_client_can_be_kicked(opened: Opened, store: ts.Database) -> None:
    session = store.sessions.open("kicked/?", clean_start=True)
    page = opened.see("sessions?sort=client_id")
    page.get_by_role("button", name="Kick kicked/?").click()
    with page.expect_response(re.compile("/sessions/.*/kick$")) as answer:
        page.get_by_role("button", name="Kick it").click()

    assert 200 == answer.value.status
    assert session.ended is not None


@pytest.mark.parametrize("view", ["replay?filter=hostile/%23", "topics?search=hostile", "sessions"])
def test_what_messages_contain_is_text(opened: Opened, view: str) -> None:
    page = opened.see(view)

    assert 0 == page.locator("main img, main b, main script").count()
    assert "owned" not in page.title()
    if view.startswith("replay"):
        expect(page.locator("#rows .topic").first).to_have_text(f"hostile/{_HOSTILE}")
        expect(page.locator("#rows .unfolded dt").first).to_have_text(_HOSTILE)
        expect(page.locator("#values-legend")).to_contain_text(_HOSTILE)


def test_a_filter_that_is_none_is_explained(context: BrowserContext, server: Server) -> None:
    opened = Opened.of(context, server.urls_of_http[0])
    opened.page.goto(f"{opened.url}/#replay?filter=a/%23/b")

    expect(opened.page.get_by_role("alert")).to_contain_text("#")
    expect(opened.page.get_by_role("alert")).to_be_visible()
    opened.page.close()


def test_it_can_be_used_with_the_keyboard_alone(opened: Opened) -> None:
    page = opened.see("now")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    page.get_by_role("tab", name="Now").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Topics")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Topics")).to_be_visible()
    page.locator("#tree [role=treeitem][tabindex='0']").focus()
    page.keyboard.press("End")
    page.keyboard.press("Home")
    before = page.locator("#tree [role=treeitem]:visible").count()
    page.locator("#tree [role=treeitem]:focus").press("ArrowRight")
    expect(page.locator("#tree [role=treeitem] [role=treeitem]").first).to_be_visible()
    assert before < page.locator("#tree [role=treeitem]:visible").count()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tree [role=treeitem]:focus")).to_have_attribute("aria-expanded", "false")
    outline = page.evaluate(
        "(document.querySelector('#tree [role=treeitem]:focus-visible > div') && "
        "getComputedStyle(document.querySelector('#tree [role=treeitem]:focus-visible > div')).outlineStyle)"
    )
    assert "solid" == outline


def test_the_other_scheme_can_be_chosen_and_stays(opened: Opened) -> None:
    page = opened.see("now")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    before = page.evaluate(ground)
    page.click("#theme")
    after = page.evaluate(ground)
    page.reload()

    assert before != after
    assert after == page.evaluate(ground)
    page.click("#theme")


def test_without_the_library_for_charts_the_tables_are_there(context: BrowserContext, server: Server) -> None:
    opened = Opened.of(context, server.urls_of_http[0])
    missing = {"library": None, "missing": "Charts need plotly"}
    opened.page.route("**/charts", lambda route: route.fulfill(json=missing))
    opened.page.goto(f"{opened.url}/#now")

    expect(opened.page.locator("#generations tbody tr").first).to_be_visible()
    expect(opened.page.locator("#rates")).to_have_text("Charts need plotly")
    opened.page.close()
    assert [] == opened.said


def test_a_token_is_asked_for_once_and_kept(tmp_path: Path, context: BrowserContext) -> None:
    digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # SHA-256 of "test"
    (tmp_path / "tokens").write_text(f"page read {digest}\n")
    http = {"anonymous": "never", "token_file": tmp_path / "tokens"}
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db, **http) as server:
        page = context.new_page()
        page.goto(server.urls_of_http[0])
        page.get_by_label("Token", exact=True).fill("test")
        page.keyboard.press("Enter")
        expect(page.locator("#generations tbody tr")).to_have_count(1)
        page.reload()
        expect(page.locator("#generations tbody tr")).to_have_count(1)

        page.get_by_role("tab", name="Publish").click()
        expect(page.locator("#publish-scope")).to_be_visible()
        expect(page.get_by_role("button", name="Publish")).to_be_disabled()
        assert not page.locator("#token").is_visible()
        assert "test" == page.evaluate("sessionStorage['topicstore-token']")
        page.close()


def test_it_moves_less_where_less_is_wanted(chromium: Open, server: Server) -> None:
    opened = Opened.of(chromium(1440, "light", reduced_motion="reduce"), server.urls_of_http[0])
    page = opened.see("now")

    assert "none" == page.evaluate("getComputedStyle(document.querySelector('.bar'), '::after').transitionProperty")
