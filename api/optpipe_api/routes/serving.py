"""How a route gets at the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from optpipe_api.service import Service

__all__ = ["Serving"]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Serving = Annotated[Service, Depends(_service)]
