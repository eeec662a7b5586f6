"""Documents and pages that never change: built once, with an entity tag, and not without end."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel

from optpipe import Model, Problem, Schedule
from optpipe.answers import Catalogue
from optpipe_api import auth, main
from tests.api.live import client, connected, make_settings, running

CONSTANT = (
    *("/", "/docs", "/openapi.json", "/v1/methods", "/v1/presets"),
    *("/v1/schemas/problem", "/v1/schemas/model", "/v1/schemas/schedule"),
)
SCHEMAS: dict[str, type[BaseModel]] = {"problem": Problem, "model": Model, "schedule": Schedule}


@pytest.mark.parametrize("path", CONSTANT)
def test_a_constant_document_has_a_tag_and_is_sent_once_to_a_client(http, path: str) -> None:
    first = http.get(path)
    tag = first.headers["ETag"]
    assert "no-cache" in first.headers["Cache-Control"]
    strong = tag.removeprefix("W/")
    for known in (tag, strong, f'"other", {tag}', "*"):
        again = http.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    for other in ('"other"', "", strong.strip('"')):
        again = http.get(path, headers={"If-None-Match": other})
        assert (again.status_code, again.content) == (200, first.content)
        assert again.headers["Content-Type"] == first.headers["Content-Type"]


def test_many_who_ask_for_the_openapi_document_at_once_build_it_once(tmp_path) -> None:
    built: list[dict[str, Any]] = []
    with running(make_settings(tmp_path)) as (url, app), client(url) as http:
        build = app.openapi

        def note_and_build() -> dict[str, Any]:
            built.append(build())
            return built[-1]

        app.openapi = note_and_build  # type: ignore[method-assign]
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: http.get("/openapi.json"), range(64)))
    assert {answer.json() == built[0] for answer in answers} == {True}
    assert {answer.headers["ETag"] for answer in answers} == {answers[0].headers["ETag"]}
    assert len(built) == 1


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_of_a_format_is_that_of_its_type(http, name: str) -> None:
    schema = http.get(f"/v1/schemas/{name}").json()
    assert schema.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert schema.pop("$id") == f"urn:optpipe:{name}:v1"
    assert schema == SCHEMAS[name].model_json_schema()


def test_the_catalogue_has_all_that_an_estimate_knows(http) -> None:
    assert Catalogue.model_validate_json(http.get("/v1/presets").content) == Catalogue.make()


def test_an_address_may_ask_so_often_for_what_needs_no_key(tmp_path, monkeypatch) -> None:
    """A refusal comes late, so that repeated requests do not take the event loop.

    Signs of life, and requests that need a key, have no such limit.
    """
    monkeypatch.setattr(main, "OPEN_BURST", 3)
    monkeypatch.setattr(main, "OPEN_PER_MINUTE", 3)
    monkeypatch.setattr(auth, "_PATIENCE_S", 0.5)
    with connected(make_settings(tmp_path)) as http:
        paths = ("/openapi.json", "/docs", "/", "/page/main.js", "/openapi.json")
        answers = [http.get(path) for path in paths]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[3].json()["code"] == "key.too_many_requests"
        assert "3 times a minute for documents and pages" in answers[3].json()["detail"]
        assert 1 <= int(answers[3].headers["Retry-After"]) <= 20
        assert answers[3].elapsed.total_seconds() >= 0.5
        for path in ("/healthz", "/readyz", "/v1/jobs"):
            assert http.get(path).status_code == 200
