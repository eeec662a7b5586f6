"""Fetching schedules: forms and entity tags."""

from xml.etree import ElementTree as ET

import pytest

from optpipe import load_schedule

TRACE = "application/vnd.optpipe.trace+json"


@pytest.fixture
def path(ended) -> str:
    return f"/v1/jobs/{ended['id']}/schedule"


def test_a_trace_shows_every_action(http, path) -> None:
    named = http.get(path, params={"format": "trace"})
    assert named.headers["content-type"] == TRACE
    events = [event for event in named.json()["traceEvents"] if event["ph"] == "X"]
    programs = load_schedule(http.get(path).text).programs
    assert sorted(event["name"] for event in events) == sorted(
        str(action) for program in programs for action in program
    )
    assert http.get(path, headers={"Accept": TRACE}).content == named.content


def test_a_picture_is_an_svg_without_scripts(http, path) -> None:
    first, again = (http.get(path, headers={"Accept": "image/svg+xml"}) for _ in range(2))
    assert first.headers["content-type"] == "image/svg+xml"
    assert "sandbox" in first.headers["content-security-policy"]
    root = ET.fromstring(first.text)
    assert root.tag.endswith("svg")
    assert not [item for item in root.iter() if item.tag.endswith("script")]
    assert first.content == again.content


@pytest.mark.parametrize("form", ["json", "csv", "trace"])
def test_each_form_has_a_tag_by_which_it_is_known(http, ended, path, form) -> None:
    first = http.get(path, params={"format": form})
    tag = first.headers["etag"]
    assert tag.startswith(f'W/"{ended["id"]}.{ended["num_schedules"]}')
    same = http.get(path, params={"format": form}, headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    assert same.headers["vary"] == "Accept"
    other = {"json": "csv", "csv": "trace", "trace": "json"}[form]
    assert http.get(path, params={"format": other}, headers={"If-None-Match": tag}).content
