"""Documents of problems: read v1 and v2 into the fields of a problem, and write these.

A stage of v2 has a list of costs, and a cost a menu of modes. A stage of v1 has both in its own
fields. No other module depends on a document's version.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from optpipe.errors import rule_broken
from optpipe.stage import MOST_COSTS, OF_STAGE, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

__all__ = ["V1", "V2", "StageSchema", "oldest_format", "read_document", "write_document"]


V1 = "optpipe/problem/v1"
V2 = "optpipe/problem/v2"
_ONLY_V2 = ("uniform_modes", "layers", "modes")
_V1_MENU = ("offload_bytes", "recompute_ms", "checkpoint_bytes")
_COST = ["forward_ms", "backward_input_ms", "backward_weight_ms", "activation_bytes"]


def oldest_format(fields: Mapping[str, Any]) -> str:
    """Return v1 if it can express the fields of a problem, else v2.

    Raises ValueError, with rule and fix, where the fields are of v1 and v1 cannot say them.
    """
    stages = [*fields["stages"], *chain.from_iterable(fields["other_costs"])]
    named = fields["context"] is not None or any(stage.layers for stage in stages)
    menus = any(stage.uniform_modes or stage.modes for stage in stages)
    if named or menus or fields["pairs"] or fields["microbatches"] or fields["order"] != "free":
        if fields["format"] == V2:
            return V2
        raise rule_broken(
            "layers, context, modes, pairs, microbatches, order and uniform_modes are fields "
            f"of {V2}, and format is {fields['format']}",
            f"write format {V2}",
        )
    lanes = {(link.source, link.target) for link in fields["links"] if link.bandwidth_gb_per_s}
    queues = any(
        this.output_bytes and lanes & {(this.device, that.device), (that.device, this.device)}
        for this, that in pairwise(fields["stages"])
    )
    return V2 if fields["format"] == V2 and queues else V1


def read_document(data: Any) -> Any:
    """Return the fields of a problem that a document of either format has.

    Data that are no object are returned as they are. Raises ValueError, with rule and fix.
    """
    if not isinstance(data, dict):
        return data
    if not isinstance(data.get("other_costs", ()), tuple):
        raise rule_broken("other_costs: unknown field", "write all costs into stages[0].costs")
    if data.get("format") != V2:
        return data
    fields = dict(data)
    if fields.get("microbatches", ()) is None:
        del fields["microbatches"]
    stages = fields.get("stages")
    if isinstance(stages, list | tuple):
        rows = [_read_stage(f"stages[{index}]", stage) for index, stage in enumerate(stages)]
        fields["stages"] = [stage for stage, _ in rows]
        if any(others for _, others in rows):
            fields["other_costs"] = tuple(others for _, others in rows)
    return fields


def _read_stage(at: str, stage: Any) -> tuple[Any, tuple[Stage, ...]]:
    """Return the fields of a stage under its first cost, and the stage under each other cost."""
    if not isinstance(stage, dict) or "costs" not in stage:
        return stage, ()
    costs = stage["costs"]
    if (
        not isinstance(costs, list | tuple)
        or not 0 < len(costs) <= MOST_COSTS
        or not all(isinstance(cost, dict) for cost in costs)
    ):
        raise rule_broken(
            f"{at}.costs must be a list of 1 to {MOST_COSTS} objects",
            "give one object per cost that micro-batches have",
        )
    head = {name: value for name, value in stage.items() if name != "costs"}
    for number, cost in enumerate(costs):
        for name in sorted({*_V1_MENU, *OF_STAGE} & cost.keys()):
            raise rule_broken(
                f"{at}.costs[{number}].{name}: unknown field",
                "modes say what is offloaded and recomputed",
            )
    for name in sorted(head.keys() - set(OF_STAGE)):
        raise rule_broken(
            f"{at}.{name}: unknown field beside costs",
            f"write it into {at}.costs[0]" if name in Stage.model_fields else "remove it",
        )
    first, *others = ({**head, **cost} for cost in costs)
    return first, tuple(
        _read_cost(f"{at}.costs[{number}]", cost) for number, cost in enumerate(others, start=1)
    )


def _read_cost(at: str, fields: dict[str, Any]) -> Stage:
    """Return a stage under a cost of its own; its first fault has its path."""
    try:
        return Stage.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join([at, *(str(part) for part in fault["loc"])])
        if fault["type"] == "rule":
            context = fault["ctx"]
            raise rule_broken(f"{place}: {context['rule']}", context["fix"]) from None
        rule = f"{place} = {str(fault['input'])[:60]}: {fault['msg']}"
        raise rule_broken(rule, "correct it") from None


def write_document(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the document that the JSON-like fields of a problem are in their format."""
    if fields["format"] != V2:
        return fields
    others = fields.pop("other_costs", None) or [()] * len(fields["stages"])
    stages = []
    for stage, costs in zip(fields["stages"], others, strict=True):
        head = {name: stage[name] for name in OF_STAGE if name in stage}
        written = [_write_cost(one) for one in (stage, *costs)]
        stages.append({"uniform_modes": False, **head, "costs": written})
    return {**fields, "stages": stages}


def _write_cost(stage: dict[str, Any]) -> dict[str, Any]:
    cost = {name: value for name, value in stage.items() if name not in OF_STAGE}
    offload, again, kept = (cost.pop(name) for name in _V1_MENU)
    modes: list[dict[str, Any]] = cost.pop("modes", None) or [{"name": "keep"}]
    if offload:
        modes = [*modes, {"name": "offload", "offload_bytes": offload}]
    if again is not None:
        named = {"name": "recompute", "forward_bytes": kept}
        modes = [*modes, {**named, "recompute_ms": again, "recompute": "apart"}]
    return {**cost, "modes": modes}


class StageSchema:
    """The published schema of a stage: that of v1, or that of v2 with its costs in a list."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        stage = handler(schema)
        known = handler.resolve_ref_schema(stage)["properties"]
        cost = {k: v for k, v in known.items() if k not in (*OF_STAGE, *_V1_MENU)}
        limits = {"minItems": 1, "maxItems": MOST_COSTS}
        costs = {"type": "array", **limits, "items": _object(cost, _COST)}
        head = {name: known[name] for name in OF_STAGE} | {"costs": costs}
        flat = {k: v for k, v in known.items() if k not in _ONLY_V2}
        return {"anyOf": [_object(flat, ["device", *_COST]), _object(head, ["device", "costs"])]}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    strict = {"type": "object", "additionalProperties": False}
    return {**strict, "properties": properties, "required": required}
