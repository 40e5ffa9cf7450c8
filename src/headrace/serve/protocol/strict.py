"""Strict parsing: a body either is exactly one of our request models or a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from headrace.serve.errors import ApiError, bad_field


class StrictModel(BaseModel):
    """No coercion, no unknown fields, no NaN. `UNSUPPORTED` names API fields that we know and refuse, with the reason."""

    # By default the parser keeps thousands of short strings for good, and values are what clients wrote.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, cache_strings="keys")
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}


M = TypeVar("M", bound=StrictModel)


def parse(model: type[M], body: bytes, passed_over: Callable[[str], None] | None = None) -> M:
    """The request in `body`; raises `ApiError` 400 naming the first field at fault.

    With `passed_over`, which is told their names, unknown fields are left out instead. Those of `UNSUPPORTED` are refused
    all the same.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False)
    if all(_is_null_of_unsupported(model, detail) for detail in details):
        # clients send null for features they do not use; the rest of the body is fine
        fields = {k: v for k, v in json.loads(body).items() if v is not None or k not in model.UNSUPPORTED}
        return parse(model, json.dumps(fields).encode(), passed_over)
    if passed_over is not None and (unknown := [d["loc"] for d in details if _is_unknown(model, d)]):
        fields = json.loads(body)
        for location in unknown:
            _leave_out(fields, _unknown_parts(location))
            passed_over(_path(_unknown_parts(location)))
        return parse(model, json.dumps(fields).encode(), passed_over)
    raise _as_api_error(model, [d for d in details if not _is_null_of_unsupported(model, d)])


def _is_null_of_unsupported(model: type[StrictModel], detail: ErrorDetails) -> bool:
    return (
        detail["type"] == "extra_forbidden"
        and len(detail["loc"]) == 1
        and detail["loc"][0] in model.UNSUPPORTED
        and detail["input"] is None
    )


def _is_unknown(model: type[StrictModel], detail: ErrorDetails) -> bool:
    location = detail["loc"]
    return detail["type"] == "extra_forbidden" and not (len(location) == 1 and location[0] in model.UNSUPPORTED)


def _unknown_parts(location: Sequence[str | int]) -> list[str | int]:
    """The way to an unknown field, whose name is a client's and may look like a branch."""
    return [*field_parts(location[:-1]), location[-1]]


def _leave_out(fields: Any, parts: Sequence[str | int]) -> None:
    for part in parts[:-1]:
        fields = fields[part]
    fields.pop(parts[-1], None)  # gone already, if two branches of a union named it


def _as_api_error(model: type[StrictModel], details: Sequence[ErrorDetails]) -> ApiError:
    detail = _most_telling(details)
    kind, location = detail["type"], detail["loc"]
    if kind == "json_invalid":
        return bad_field(None, f"The body is not valid JSON: {detail['ctx']['error']}", "invalid_json")
    param = field_path(location)
    if param is None:
        return bad_field(None, "The body must be a JSON object.", "invalid_json")
    if kind == "extra_forbidden":
        param = _path(_unknown_parts(location))
        if len(location) == 1 and (reason := model.UNSUPPORTED.get(str(location[0]))):
            return bad_field(param, f"{param} is not supported: {reason}", "unsupported_parameter")
        return bad_field(param, f"Unknown field {param}.", "unknown_parameter")
    if kind == "missing":
        return bad_field(param, f"{param} is required.", "missing_required_parameter")
    if kind == "union_tag_invalid":
        context = detail["ctx"]
        name = str(context["discriminator"]).strip("'")
        path = f"{param}.{name}"
        return bad_field(path, f"{path} is {context['tag']!r}; supported here: {context['expected_tags']}")
    if kind == "union_tag_not_found":
        path = f"{param}.{str(detail['ctx']['discriminator']).strip(chr(39))}"
        return bad_field(path, f"{path} is required.", "missing_required_parameter")
    if kind == "literal_error" and isinstance(detail["input"], str):
        return bad_field(param, f"{param} is {detail['input'][:100]!r}; supported here: {detail['ctx']['expected']}")
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_field(param, f"{param}: {detail['msg'].removeprefix('Value error, ')}.", code)


def _most_telling(details: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of the errors of all branches of a union, the one that got furthest; a wrong value tells more than a wrong type."""
    first = details[0]["loc"][:1]
    same_field = [d for d in details if d["loc"][:1] == first]
    return max(same_field, key=lambda d: (len(field_parts(d["loc"])), not d["type"].endswith("_type")))


def field_parts(location: Sequence[str | int]) -> list[str | int]:
    """A pydantic location without the union branches and tags in it."""
    parts: list[str | int] = []
    previous: str | int | None = None
    for item in location:
        if isinstance(item, int) or previous is None or not _is_branch(item, previous):
            parts.append(item)
        previous = item
    return parts


_TAGS = {"system", "developer", "user", "assistant", "tool", "text", "refusal", "json_schema", "json_object"}


def _is_branch(item: str, previous: str | int) -> bool:
    # branches are called `list[str]`, `constrained-str`, `str` or by their class; tags follow their discriminated field
    tagged = item in _TAGS and (isinstance(previous, int) or previous == "response_format")
    named = item.isidentifier() or item.isdecimal()
    return tagged or not named or item == "str" or item[:1].isupper()


def field_path(location: Sequence[str | int]) -> str | None:
    """`messages[0].content` for a location, None for the body itself."""
    return _path(field_parts(location)) or None


def _path(parts: Sequence[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
