"""Jobs over HTTP: long tasks that are started, watched and cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.http.jobs import Jobs, Progress
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import client_of


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ts.Database, Server]]:
    """A database on disk, with its server; exports go to the directory ``out`` beside the database."""
    folder = tmp_path_factory.mktemp("jobs")
    with ts.open(folder / "db", backend="rocksdb", shards=2) as db:
        db.store([ts.Message(f"a/{number % 7}", b"x" * 20, f"c{number % 5}") for number in range(1_000)])
        db.add_generation()
        with serving_http(db, export_dir=folder / "out") as server:
            yield db, server


@pytest.fixture
def http(own: tuple[ts.Database, Server]) -> Iterator[httpx.Client]:
    """An HTTP client of the server that `own` returns."""
    with client_of(own[1]) as client:
        yield client


def jobs_of(server: Server) -> Jobs:
    """Return the server's jobs."""
    assert server.http is not None
    return server.http.context.jobs


def done(http: httpx.Client, **request: Any) -> dict[str, Any]:
    """Start a job, and return it when it has ended."""
    answer = http.post("/jobs", json=request)
    assert answer.status_code == 202, answer.text
    return ended(http, answer.json()["id"])


def ended(http: httpx.Client, number: int) -> dict[str, Any]:
    """Return a job when it has ended."""
    while (job := http.get(f"/jobs/{number}").json())["state"] == "running":
        pass
    return job  # type: ignore[no-any-return]


def test_a_verification_reports_what_it_read(http: httpx.Client) -> None:
    """A verification job reports its progress as a number of messages, which is complete at the end."""
    job = done(http, kind="verify")
    assert (job["state"], job["progress"], job["done"], job["total"]) == ("done", 1.0, 1_000, 1_000)
    assert job["result"] == {"ok": True, "messages": 1_000, "damages": []}


def test_a_compaction_reports_sizes(http: httpx.Client) -> None:
    """The result of a compaction job has the fields of `CompactReport`."""
    job = done(http, kind="compact")
    assert job["state"] == "done"
    assert {"messages", "live_bytes_before", "disk_bytes_after", "seconds"} <= set(job["result"])


def test_retention_runs_as_a_job(http: httpx.Client) -> None:
    """A retention job runs to its end, and reports that it can't be cancelled."""
    job = done(http, kind="retention")
    assert (job["state"], job["cancellable"], job["result"]["dropped"]) == ("done", False, [])


def test_an_export_holds_every_message(http: httpx.Client, own: tuple[ts.Database, Server]) -> None:
    """An export has every message, and a second one skips the existing parts.

    A target that holds something else is refused.
    """
    first = done(http, kind="export", target="parquet")
    assert (first["state"], first["done"], first["total"], first["result"]["messages"]) == ("done", 2, 2, 1_000)
    again = done(http, kind="export", target="parquet", generations=[1])
    assert (again["result"]["slabs"], again["result"]["slabs_before"]) == (0, 2)
    other = own[0].path.parent / "out" / "other"
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    failed = done(http, kind="export", target="other")
    assert (failed["state"], failed["result"]) == ("failed", None)
    assert [one.name for one in other.iterdir()] == ["mine"]
    assert done(http, kind="export", target="parquet", generations=[2])["title"] == "GenerationError"


def test_a_checkpoint_is_a_database(http: httpx.Client) -> None:
    """A checkpoint job creates a database, and never overwrites a target."""
    job = done(http, kind="checkpoint", target="copies/one")
    assert (job["state"], job["result"]["messages"]) == ("done", 1_000)
    with ts.open(job["result"]["target"], mode="r") as copy:
        assert copy.info().messages == 1_000
    assert http.post("/jobs", json={"kind": "checkpoint", "target": "copies/one"}).status_code == 409


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_a_target_whose_name_is_too_long_makes_the_job_fail(http: httpx.Client, kind: str) -> None:
    job = done(http, kind=kind, target="x" * 5_000)
    assert (job["state"], job["title"], "too long" in job["error"]) == ("failed", "FileSystemError", True)


@pytest.mark.parametrize("target", ["../up", "/etc/x", "a/../../b", "link/x", ".", "", "a\0b", None])
def test_targets_elsewhere_are_refused(
    http: httpx.Client, own: tuple[ts.Database, Server], tmp_path: Path, target: str | None
) -> None:
    """Targets outside the export directory are refused, even by way of symbolic links."""
    out = own[0].path.parent / "out"
    out.mkdir(exist_ok=True)
    (out / "link").unlink(missing_ok=True)
    (out / "link").symlink_to(tmp_path)
    for kind in ("export", "checkpoint"):
        assert http.post("/jobs", json={"kind": kind, "target": target}).status_code == 400
    assert list(tmp_path.iterdir()) == []


def test_one_of_a_kind_runs_and_can_be_cancelled(http: httpx.Client, own: tuple[ts.Database, Server]) -> None:
    """Only one job of a kind runs at a time, and a cancelled one ends at its next step.

    Starting a second one is a conflict until then.
    """
    begun, gate = threading.Event(), threading.Event()

    def work(progress: Progress) -> None:
        progress.tell(1, 4)
        begun.set()
        gate.wait()
        progress.tell(2, 4)

    job = jobs_of(own[1]).start("verify", {}, work)
    begun.wait()
    running = http.get(f"/jobs/{job.id}").json()
    assert (running["state"], running["progress"], running["done"]) == ("running", 0.25, 1)
    assert http.post("/jobs", json={"kind": "verify"}).status_code == 409
    assert http.delete(f"/jobs/{job.id}").json()["cancelling"] is True
    gate.set()
    last = ended(http, job.id)
    assert (last["state"], last["result"], last["error"]) == ("cancelled", None, None)
    assert done(http, kind="verify")["state"] == "done"
    assert http.delete(f"/jobs/{job.id}").json()["state"] == "cancelled"


def test_what_can_t_be_cancelled_says_so(http: httpx.Client, own: tuple[ts.Database, Server]) -> None:
    """A job that can't be cancelled answers 409, and continues to its end."""
    gate = threading.Event()
    job = jobs_of(own[1]).start("checkpoint", {}, lambda _: gate.wait())
    assert http.delete(f"/jobs/{job.id}").status_code == 409
    gate.set()
    last = ended(http, job.id)
    assert (last["state"], last["result"]) == ("done", True)


def test_unknown_jobs_and_kinds(http: httpx.Client) -> None:
    """A request for an unknown job is answered with 404, and a job of an unknown kind with 400."""
    assert http.get("/jobs/99999").status_code == 404
    assert http.delete("/jobs/99999").status_code == 404
    assert http.post("/jobs", json={"kind": "format"}).status_code == 400
    newest = done(http, kind="verify")["id"]
    assert http.get("/jobs").json()["items"][0]["id"] == newest


def test_a_server_that_ends_cancels_jobs_and_waits_for_them(tmp_path: Path) -> None:
    """A stopping server cancels its jobs and waits for them."""
    told: list[str] = []
    with ts.open(tmp_path / "db", backend="memory") as db:
        with serving_http(db) as server:
            jobs, begun = jobs_of(server), threading.Event()

            def work(progress: Progress) -> None:
                begun.set()
                progress.cancelled.wait()
                told.append("cancelled")
                progress.tell(1)

            job = jobs.start("verify", {}, work)
            begun.wait()
        assert told == ["cancelled"]
        last = jobs.find(job.id)
        assert last is not None
        assert last.state == "cancelled"


def test_a_hundred_ended_jobs_are_remembered() -> None:
    """The last hundred jobs that have ended are kept, and older ones are forgotten."""
    jobs = Jobs()
    for _ in range(105):
        job = jobs.start("verify", {}, lambda _: None)
        while (found := jobs.find(job.id)) is not None and found.state == "running":
            pass
    assert [one.id for one in jobs] == list(range(105, 5, -1))
    jobs.stop()
    jobs.join()


def test_a_fault_in_a_job_is_its_error(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error in a job is logged, and clients see only that the server failed."""
    jobs = Jobs()

    def work(_: Progress) -> None:
        raise ZeroDivisionError("secret")

    job = jobs.start("compact", {}, work)
    jobs.stop()
    jobs.join()
    last = jobs.find(job.id)
    assert last is not None
    assert (last.state, last.error) == ("failed", "the server failed; its log says why")
    assert "secret" in caplog.text
