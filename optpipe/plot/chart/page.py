"""A bokeh layout as JSON for a page that has BokehJS, or as one file that holds everything."""

from __future__ import annotations

import hashlib
import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from bokeh.embed import json_item
from bokeh.resources import Resources
from bokeh.themes import Theme as BokehTheme

from optpipe.plot.chart import COMPONENTS
from optpipe.plot.chart.style import PALETTES, Theme, theme_of

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM

__all__ = ["html_of", "item_of"]

_COUNTED = re.compile(r"p\d+")
_PLACE = "chart"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="{theme}">
<title>{title}</title>
<style>
body {{ margin: 12px 16px; background: {page}; color: {text}; font: 14px system-ui, sans-serif; }}
h1 {{ font-size: 18px; margin: 0 0 8px; overflow-wrap: anywhere; }}
.bk-Tooltip {{ --tooltip-color: {page}; --tooltip-text: {text}; --tooltip-border: {edge};
  --tooltip-arrow-color: {edge}; }}
</style>
{scripts}
</head>
<body>
<h1>{title}</h1>
<main id="{place}"></main>
<script type="application/json" id="item">{item}</script>
<script>
Bokeh.embed.embed_item(JSON.parse(document.getElementById("item").textContent), "{place}")
</script>
</body>
</html>
"""


def item_of(layout: LayoutDOM, theme: Theme) -> str:
    """Return the JSON that ``Bokeh.embed.embed_item`` reads."""
    item = json_item(layout, theme=BokehTheme(json=theme_of(theme)))
    return json.dumps(_renamed(item), separators=(",", ":"), allow_nan=False)


def html_of(layout: LayoutDOM, title: str, theme: Theme) -> str:
    """Return one file without a request to anywhere."""
    look = PALETTES[theme]
    scripts = Resources(mode="inline", components=list(COMPONENTS)).render_js()
    return _PAGE.format(
        theme=theme,
        title=escape(title),
        page=look.page,
        text=look.text,
        edge=look.edge,
        scripts=scripts,
        place=_PLACE,
        # Nothing in a script element may look like its end.
        item=item_of(layout, theme).replace("</", "<\\/"),
    )


def _renamed(item: Any) -> Any:
    """Return an item whose models are numbered by their place in it, below a digest of it.

    Bokeh counts models from the start of the process, so that the same chart would be other bytes
    each time. The digest keeps the models of two charts on one page apart.
    """
    plain = _walked(item, {}, "")
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return _walked(item, {}, hashlib.sha256(text.encode()).hexdigest()[:10])


def _walked(value: Any, names: dict[str, str], prefix: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _renamed_id(part, names, prefix)
            if key in {"id", "root_id"} and isinstance(part, str) and _COUNTED.fullmatch(part)
            else _walked(part, names, prefix)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_walked(part, names, prefix) for part in value]
    return value


def _renamed_id(name: str, names: dict[str, str], prefix: str) -> str:
    return names.setdefault(name, f"{prefix}-{len(names)}")
