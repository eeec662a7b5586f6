"""``/v1/key``: who is asking, and what he may do."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from optpipe_api.access import Role
from optpipe_api.http_errors import documented
from optpipe_api.routes.serving import Reader  # noqa: TC001 - FastAPI reads it

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["system"])


class KeyView(BaseModel):
    """The key of a request; where none is asked for, no name and every right."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ci", "role": "submit"}]})

    name: str
    role: Role


@router.get("/key", responses=documented(), summary="Which key is this")
async def key(who: Reader) -> KeyView:
    """Return the name and the role of the key that the request brings, never the key."""
    return KeyView(name=who.name, role=who.role)
