"""Documentation in a real browser: complete, and with nothing from elsewhere."""

from __future__ import annotations

import html
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api.live import make_settings, running
from tests.browser.visit import visiting
from tests.docs_console import ROOT

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
    with running(make_settings(tmp_path)) as (url, _), visiting(chromium, url) as visit:
        page = visit.page
        page.on("requestfailed", lambda request: visit.errors.append(request.url))
        page.goto(f"{url}/docs")
        page.wait_for_selector(".opblock")
        shown = {
            f"{block.locator('.opblock-summary-method').inner_text()} "
            f"{block.locator('.opblock-summary-path').get_attribute('data-path')}"
            for block in page.locator(".opblock").all()
        }
        page.locator("#operations-jobs-jobs_submit .opblock-summary-control").click()
        page.wait_for_selector("text=optpipe/problem/v1")
        assert shown == operations(url)
    assert shown >= EVERY_SERVICE


def formulas() -> set[str]:
    """Every formula of the pages that are written by hand."""
    found = set()
    for page in (ROOT / "docs").rglob("*.md"):
        if "generated" not in page.parts:
            text = re.sub(
                r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
            )
            text = re.sub(r"`[^`\n]*`", "", text)
            pairs = re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$", text, flags=re.DOTALL)
            found |= {block or inline for block, inline in pairs}
    return found


@pytest.mark.browser
def test_every_formula_is_set_without_network(chromium: Browser, tmp_path) -> None:
    """By the MathJax that the built pages carry, which asks for nothing else."""
    package = find_spec("sphinx-mathjax-offline")
    assert package is not None
    script = Path(str(package.origin)).parent / "static" / "mathjax" / "tex-svg.js"
    spans = "".join(f"<p>\\({html.escape(formula)}\\)</p>" for formula in sorted(formulas()))
    file = tmp_path / "formulas.html"
    file.write_text(f'<script src="{script.as_uri()}"></script>{spans}', "utf-8")
    context = chromium.new_context(offline=True)
    page = context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(file.as_uri())
    page.evaluate("MathJax.startup.promise")
    assert page.locator("mjx-container svg").count() >= len(formulas()) > 20
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert all(address.startswith("file:") for address in requested)
    context.close()
