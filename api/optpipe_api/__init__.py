"""The service: jobs over HTTP, kept in a database, solved in processes of their own.

`create_app` makes the ASGI application from `Settings`; nothing happens at import. The names are
looked up on first use, because solver processes live in this package too and need no web framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optpipe_api.main import create_app, serve
    from optpipe_api.settings import Settings

__all__ = ["Settings", "create_app", "serve"]


_HOMES = {
    "Settings": "optpipe_api.settings",
    "create_app": "optpipe_api.main",
    "serve": "optpipe_api.main",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
