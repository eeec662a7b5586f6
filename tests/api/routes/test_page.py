"""The files of the page: complete, from here alone, and open where keys are wanted."""

import re
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

import optpipe_api
from optpipe_api.routes import system
from tests.api.live import connected, make_settings

WEB = Path(optpipe_api.__file__).parent / "web"
IMPORT = re.compile(r'from "\./([^"]+)"')
BOKEH = f"/page/bokeh/{version('bokeh')}"


def test_the_front_door_is_the_page_with_a_strict_policy(http) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe-inline" not in policy["script-src"]
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["cache-control"] == "no-cache"
    assert "http:" not in policy["script-src"]


def test_every_file_that_the_page_names_is_served(http) -> None:
    """From the page to its modules, and from each module to those it imports."""
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', http.get("/").text))
    named |= {
        f"page/{name}"
        for file in WEB.glob("*.js")
        for name in IMPORT.findall(file.read_text("utf-8"))
    }
    assert named >= {"page/main.js", "page/page.css", "page/http.js"}
    for path in sorted(named):
        assert http.get(f"/{path}").status_code == 200, path


LISTED = re.compile(r'\["(\w+)", "[^"]+"(?:\]|, \{|, EMPTY)')
FORMS = {
    "preset.js": {"estimate"},
    "compose.js": {"solve"},
    "start.js": {"tune", "current", "solve"},
}


@pytest.mark.parametrize("file", FORMS)
def test_every_field_that_a_form_lists_is_a_field_of_its_request(http, file: str) -> None:
    """The list is all that a form needs: `controls.js` takes the rest from the document."""
    fields = http.get("/v1/presets").json()["fields"]
    listed = LISTED.findall((WEB / file).read_text("utf-8"))
    assert len(listed) > 2
    assert set(listed) <= {name for request in FORMS[file] for name in fields[request]}


def test_no_file_of_the_page_names_another_host() -> None:
    """And none is long, or a library."""
    for file in WEB.iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), file.name
        assert len(text.splitlines()) <= 250, file.name


def test_files_are_asked_for_again_and_bokeh_is_kept(http) -> None:
    """Ours change with the server; what has a version in its address never does."""
    ours = http.get("/page/main.js")
    assert ours.headers["cache-control"] == "no-cache"
    assert ours.headers["x-content-type-options"] == "nosniff"
    again = http.get("/page/main.js", headers={"If-None-Match": ours.headers["etag"]})
    assert again.status_code == 304
    library = http.get(f"{BOKEH}/bokeh.min.js")
    assert "immutable" in library.headers["cache-control"]
    assert "javascript" in library.headers["content-type"]
    assert f"{BOKEH[1:]}/bokeh.min.js" in http.get("/").text


@pytest.mark.parametrize(
    "path",
    [
        f"{BOKEH}/compiler.js",
        f"{BOKEH}/../../../../__init__.py",
        "/page/../main.py",
        "/page/%2e%2e/main.py",
        "/page/",
        "/page/none.js",
    ],
)
def test_nothing_else_is_served(http, path: str) -> None:
    answer = httpx.get(f"{http.base_url}{path}")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_server_without_bokeh_has_a_page_without_charts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(system, "find_spec", lambda name: None)
    with connected(make_settings(tmp_path)) as http:
        assert 'data-bokeh=""' in http.get("/").text
        assert http.get(f"{BOKEH}/bokeh.min.js").status_code == 404
        assert "pip install '.[plot]' in a clone of OptPipe" in http.get("/page/chart.js").text
