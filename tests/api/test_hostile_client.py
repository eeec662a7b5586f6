"""What a hostile client finds: no secrets, no way around a browser, no way to hold everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import sqlalchemy as sa

from optpipe_api import Settings
from optpipe_api.errors import StoreUnavailableError
from optpipe_api.store import open_stores
from tests.api.live import connected, make_settings, running, two_stages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server on loopback that asks for no keys, as `optpipe serve` starts it."""
    with connected(make_settings(tmp_path_factory.mktemp("server"))) as client:
        yield client


# --- Nothing of the inside is told


def test_what_the_driver_says_of_the_database_stays_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither where it is nor why it does not answer; a request and `/readyz` alike."""
    settings = make_settings(tmp_path)
    with running(settings) as (url, app), httpx.Client(base_url=url, timeout=120) as http:
        app.state.service._stores.engine.dispose()
        for path in tmp_path.glob("jobs.db*"):
            path.unlink()
        (tmp_path / "jobs.db").write_text("no database " * 1000, "utf-8")
        for answer in (http.get("/readyz"), http.get("/v1/jobs/" + "0" * 32)):
            assert (answer.status_code, answer.json()["code"]) == (503, "store.unavailable")
            assert int(answer.headers["retry-after"]) > 0
            for inside in (str(tmp_path), "sqlite", "jobs.db", "not a database", "deleted"):
                assert inside not in answer.text
    assert f"{tmp_path}/jobs.db does not answer" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@127.0.0.1:1/db",
        "postgresql://user@127.0.0.1:1/db?password=hunter2",
        "postgresql://user@127.0.0.1:1/db?sslpassword=hunter2&connect_timeout=1",
        "postgresql://user:hunter2@127.0.0.1:1/db?hunter2=1",
        "mysql://user@host/db?passwd=hunter2",
    ],
)
def test_no_form_of_a_url_shows_its_password(url: str) -> None:
    """Not even to whoever runs the server, who may paste the message somewhere."""
    with pytest.raises(Exception, match="database") as caught:
        open_stores(url)
    if "?hunter2=" not in url:
        assert "hunter2" not in str(caught.value)
    assert "user:hunter2" not in str(caught.value)


# --- Ready is who can write


def test_a_database_that_takes_nothing_is_not_ready(tmp_path: Path) -> None:
    """A full disk, and a file that was deleted: reading works on in both."""
    settings = make_settings(tmp_path)
    with running(settings) as (url, app), httpx.Client(base_url=url, timeout=120) as http:
        assert http.get("/readyz").status_code == 200
        stores = app.state.service._stores
        stores.probe()
        (tmp_path / "jobs.db").rename(tmp_path / "other.db")
        with pytest.raises(StoreUnavailableError, match="deleted or replaced"):
            stores.probe()
        app.state.service._counted_at = 0.0
        assert http.get("/readyz").json()["code"] == "store.unavailable"
        (tmp_path / "other.db").rename(tmp_path / "jobs.db")
        for answer, status in (("ON", 503), ("OFF", 200)):

            def refuse(connection: Any, *_: object, answer: str = answer) -> None:
                connection.execute(f"PRAGMA query_only = {answer}")

            sa.event.listen(stores.engine, "checkout", refuse)
            app.state.service._counted_at = 0.0
            assert http.get("/readyz").status_code == status
            sa.event.remove(stores.engine, "checkout", refuse)


# --- A browser on this machine shows the attacker's page


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", ""]
)
def test_a_name_that_was_bound_anew_reads_nothing(http: httpx.Client, host: str) -> None:
    """DNS rebinding: the page's own name now leads to this machine."""
    for path in ("/v1/jobs", "/v1/presets", "/readyz", "/"):
        answer = http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "request.other_site"), path
    body = {"problem": two_stages()}
    assert http.post("/v1/jobs", json=body, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:81", "127.0.0.1:9", "[::1]:8000"])
def test_this_machine_s_own_names_are_answered(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/jobs", headers={"Host": host}).status_code == 200


def test_others_are_named_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTPIPE_ALLOWED_HOSTS", "Plans.example, localhost")
    with connected(make_settings(tmp_path)) as http:
        assert http.get("/v1/jobs", headers={"Host": "plans.example:80"}).status_code == 200
        answer = http.get("/v1/jobs")
        assert answer.status_code == 403
        assert "OPTPIPE_ALLOWED_HOSTS" in answer.json()["detail"]
    assert Settings(host="0.0.0.0").hosts == frozenset({"plans.example", "localhost"})
    monkeypatch.delenv("OPTPIPE_ALLOWED_HOSTS")
    assert Settings(host="0.0.0.0").hosts is None
    assert Settings(require_keys=True).hosts is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_a_post_without_a_body_from_another_site_is_refused(
    http: httpx.Client, headers: dict[str, str]
) -> None:
    """It needs no leave of ours, as one with JSON does: a form can send it."""
    job = http.post("/v1/jobs", json={"problem": two_stages("improve:1:60")}).json()
    for method, path in (("POST", "retry"), ("POST", "resume"), ("DELETE", "")):
        answer = http.request(method, f"/v1/jobs/{job['id']}/{path}".rstrip("/"), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "request.other_site")
    assert http.get(f"/v1/jobs/{job['id']}").json()["state"] in ("queued", "running")
    ours = {"Sec-Fetch-Site": "same-origin", "Origin": str(http.base_url).rstrip("/")}
    assert http.delete(f"/v1/jobs/{job['id']}", headers=ours).status_code < 300


# --- What the document says


def test_the_document_names_operations_readably_and_knows_of_keys(http: httpx.Client) -> None:
    """Generated clients have methods called `jobs_submit`, not `submit_v1_jobs_post`."""
    document = http.get("/openapi.json").json()
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert "jobs_submit" in names
    assert not [name for name in names if "v1" in name or "__" in name]
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{}, {"key": []}]
