"""The page on a service that wants keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from optpipe_api.access import Role
from tests.api.live import client, make_settings, running, two_stages, until
from tests.browser.visit import DRAWN, READY, SCHEDULE, taken, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_a_service_with_keys_asks_once_and_the_key_stays_in_the_tab(
    chromium: Browser, tmp_path
) -> None:
    with running(make_settings(tmp_path, require_keys=True)) as (url, app):
        key = app.state.service.keys.create("engineer", Role.SUBMIT)[1]
        assert httpx.get(f"{url}/v1/jobs").status_code == 401
        with visiting(chromium, url) as visit:
            page = visit.page
            page.goto(f"{url}/{SCHEDULE}")
            page.wait_for_selector("#key-dialog[open]")
            visit.picture("key")
            page.fill("#key-input", "opk_wrong")
            page.keyboard.press("Enter")
            page.wait_for_selector("#key-why >> text=not known here")
            page.fill("#key-input", key)
            page.keyboard.press("Enter")
            page.wait_for_selector(READY)
            taken(page, two_stages(name="improve:2:0"))
            page.click("#solve")
            page.wait_for_selector("#job[data-state=succeeded]")
            page.wait_for_selector(DRAWN)
            assert page.evaluate("Object.values(localStorage)") == []
            assert page.evaluate("Object.values(sessionStorage)") == [key]
            assert not [address for address in visit.requested if "opk_" in address]


def test_who_may_only_read_estimates_sees_answers_and_is_told_what_solving_needs(
    chromium: Browser, tmp_path
) -> None:
    settings = make_settings(tmp_path, require_keys=True, solve_path="tests.api.start_solver:solve")
    with running(settings) as (url, app):
        keys = app.state.service.keys
        submitting = {"Authorization": f"Bearer {keys.create('looker', Role.SUBMIT)[1]}"}
        with client(url, headers=submitting) as http:
            body = {"problem": two_stages(name="keeps")}
            job_id = http.post("/v1/jobs?wait=60", json=body).json()["id"]
            batch_id = http.post("/v1/batches?wait=60", json={"what_if": job_id}).json()["id"]
        keys.revoke("looker")
        key = keys.create("looker", Role.READ)[1]
        reading = {"Authorization": f"Bearer {key}"}
        # A key that nobody knew is looked for once a second at most.
        until(
            lambda: httpx.get(f"{url}/v1/key", headers=reading),
            lambda answer: answer.status_code == 200,
        )
        with visiting(chromium, url) as visit:
            page = visit.page
            page.add_init_script(f"sessionStorage.setItem('optpipe-key', {key!r})")
            visit.open("?list=jobs")
            page.wait_for_selector("#jobs")
            visit.open()
            page.wait_for_selector("body[data-role=read]")
            page.locator("[data-axis=memory_scale]").fill("40")  # the stop of 50%
            page.wait_for_selector("#problem-memory >> text=39.8 GiB")
            for button in ("#solve", "#sweep", "#compare"):
                assert page.is_disabled(button)
            assert "role submit" in page.inner_text("#role-hint")
            assert page.is_hidden("#fault")
            visit.picture("reader")
            visit.open(f"?job={job_id}&what_if={batch_id}")
            page.wait_for_selector("#what-if[data-finished=true]")
            page.wait_for_selector("#ask-what-if", state="hidden")
            assert page.is_hidden("#resume")
            visit.open(f"?job={job_id}")
            page.wait_for_selector(DRAWN)
            page.wait_for_selector("#what-if", state="hidden")
