"""The OpenAPI document and its page."""

from __future__ import annotations

import re

import httpx
from topicstore.server.http.formats.request_bodies import READ
from topicstore.server.http.formats.response_bodies import ARROW, WRITTEN


def test_the_document_names_tokens_and_problems(site: httpx.Client) -> None:
    document = site.get("/schema/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert {"token": []} in document["security"]
    assert {"type", "title", "status", "detail"} == set(document["components"]["schemas"]["Problem"]["required"])
    operations = [one for path in document["paths"].values() for one in path.values()]
    assert operations
    for operation in operations:
        assert operation["tags"]
        assert operation["description"]
        content = operation["responses"]["default"]["content"]
        assert content["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
    assert len({one["operationId"] for one in operations}) == len(operations)


def test_each_operation_has_a_sentence_and_each_parameter_a_text(site: httpx.Client) -> None:
    """The summary of an operation is the first sentence of its description, and no parameter lacks a description."""
    document = site.get("/schema/openapi.json").json()
    operations = [(name, one) for name, path in document["paths"].items() for one in path.values()]
    assert [] == [
        f"{name}: {parameter['name']}"
        for name, one in operations
        for parameter in one.get("parameters", ())
        if not parameter.get("description")
    ]
    for _, one in operations:
        assert " " in one["summary"]
        assert " ".join(one["description"].replace("`", "").split()).startswith(one["summary"])


def test_the_document_names_all_that_is_taken_and_answered(site: httpx.Client) -> None:
    """The document names all media types and headers, including those that handlers parse and write themselves."""
    paths = site.get("/schema/openapi.json").json()["paths"]
    publish, replay = paths["/api/v5/messages"]["post"], paths["/api/v5/messages"]["get"]
    sql = paths["/api/v5/sql"]["post"]["responses"]["200"]["content"]
    assert set(READ) == set(publish["requestBody"]["content"])
    assert publish["requestBody"]["required"]
    assert set(WRITTEN) == set(replay["responses"]["200"]["content"])
    assert {"Topicstore-Next"} == set(replay["responses"]["200"]["headers"])
    assert {"application/json", ARROW} == set(sql)
    assert "Rows" in str(sql["application/json"])


def test_the_page_loads_from_this_server_only(site: httpx.Client) -> None:
    page = site.get("/schema")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script(?![^>]*src)|<style|style=|onload=", page.text), "the policy allows none in the page"
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert 4 == len(links)
    for link in links:
        if link != "data:,":
            assert link.startswith("/")
            assert site.get(link).status_code == 200


def test_other_files_are_not_served(site: httpx.Client) -> None:
    for name in ("index.html", "../flask_swagger_ui.py", "..%2fflask_swagger_ui.py", "VERSION"):
        assert site.get(f"/schema/assets/{name}").status_code == 404
