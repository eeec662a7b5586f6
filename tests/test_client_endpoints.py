"""The client's table of endpoints and the OpenAPI document of the service agree."""

import re
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from optpipe.answers import Job
from optpipe.client import async_client, endpoints
from optpipe.client.endpoints import Endpoint, Repeat
from optpipe.errors import InputError
from optpipe_api.main import create_app
from optpipe_api.settings import Settings
from tests.client_script import JOB

TABLE = {name: value for name, value in vars(endpoints).items() if isinstance(value, Endpoint)}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings(require_keys=True)).openapi()


@pytest.mark.parametrize("name", TABLE)
def test_the_service_documents_each_endpoint_of_the_client(document, name: str) -> None:
    """Method, path, model of the answer, and whether it has an ``Idempotency-Key``."""
    endpoint = TABLE[name]
    operation = document["paths"][endpoint.path][endpoint.method.lower()]
    names = {parameter["name"] for parameter in operation.get("parameters", [])}
    assert (endpoint.repeat is Repeat.WITH_KEY) == ("Idempotency-Key" in names)
    statuses = [status for status in operation["responses"] if status.startswith("2")]
    contents = [operation["responses"][status].get("content", {}) for status in statuses]
    if endpoint is endpoints.READY:
        return  # it documents a body, which the client does not read
    if endpoint.answer_type is NoneType:
        assert statuses == ["204"]
    elif endpoint.answer_type is str:
        schemas = [body["schema"] for content in contents for body in content.values()]
        assert {"type": "string"} in schemas
    else:
        model = endpoint.answer_type
        bodies = [content for content in contents if content]
        for body in bodies:
            answer = body.get("application/json") or body["text/event-stream"]["itemSchema"]
            assert re.findall(r"#/components/schemas/(\w+)", str(answer)) == [model.__name__]
        documented = document["components"]["schemas"][model.__name__]
        schema = model.model_json_schema()
        own = schema["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        assert bodies
        assert documented["properties"].keys() == own["properties"].keys()


def test_the_client_calls_each_endpoint_of_the_table_and_no_other() -> None:
    text = Path(async_client.__file__).read_text("utf-8")
    assert set(re.findall(r"endpoints\.([A-Z_]+)", text)) == set(TABLE)
    assert "v1/" not in text


def test_ids_fill_a_path_in_order_and_only_if_they_are_safe() -> None:
    job = Job.model_validate(JOB)
    assert endpoints.ROW_PASTE.fill_path(job, "7") == f"/v1/jobs/{job.id}/rows/7/paste"
    with pytest.raises(InputError, match="not the id of a batch"):
        endpoints.GET_BATCH.fill_path("../jobs")
    with pytest.raises(InputError, match="not the id of a row"):
        endpoints.ROW_PASTE.fill_path(job, "a/b")
