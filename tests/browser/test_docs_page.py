"""The documentation page in a real browser: complete, and with nothing from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api.live import make_settings, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

EVERY_SERVICE = {
    "POST /v1/jobs",
    "GET /v1/jobs/{job_id}/events",
    "POST /v1/batches",
    "GET /healthz",
}


def operations(url: str) -> set[str]:
    """What the service says it can be asked."""
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


@pytest.mark.browser
def test_docs_page_shows_every_operation_and_asks_no_other_host(
    chromium: Browser, tmp_path
) -> None:
    with running(make_settings(tmp_path)) as (url, _):
        page = chromium.new_page()
        requested: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(f"{url}/docs")
        page.wait_for_selector(".opblock", timeout=30_000)
        shown = {
            f"{method.inner_text()} {path.get_attribute('data-path')}"
            for block in page.locator(".opblock").all()
            for method, path in [
                (block.locator(".opblock-summary-method"), block.locator(".opblock-summary-path"))
            ]
        }
        page.locator("#operations-jobs-submit_v1_jobs_post .opblock-summary-control").click()
        page.wait_for_selector("text=optpipe/problem/v1", timeout=30_000)
        page.close()
        expected = operations(url)
    assert shown == expected
    assert shown >= EVERY_SERVICE
    assert errors == []
    foreign = [address for address in requested if not address.startswith((url, "data:"))]
    assert foreign == []
