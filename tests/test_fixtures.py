"""The servers of the marked tests are really there: without these, a marker could guard nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.postgres
def test_postgres_gives_an_empty_database_that_takes_writes(postgres_url: str) -> None:
    import sqlalchemy as sa

    engine = sa.create_engine(postgres_url)
    try:
        assert sa.inspect(engine).get_table_names() == []
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE jobs (id integer)"))
        assert sa.inspect(engine).get_table_names() == ["jobs"]
    finally:
        engine.dispose()


@pytest.mark.browser
def test_chromium_renders_a_page_and_runs_its_script(chromium: Browser) -> None:
    page = chromium.new_page()
    page.set_content("<p id=p></p><script>p.textContent = 6 * 7</script>")
    assert page.inner_text("#p") == "42"
    page.close()
