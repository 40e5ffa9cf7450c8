"""Errors as OpenAI clients expect them: an HTTP status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from headrace.base.errors import HeadraceError


class ApiError(Exception):
    """An answer that is not a result. `param` names the request field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()), self.status, headers=self.headers, media_type="application/json"
        )


def bad_field(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def from_invalid_input(error: HeadraceError) -> ApiError:
    text = error.message if error.remedy is None else f"{error.message} ({error.remedy})"
    return ApiError(400, text, param=error.field, code="invalid_value")


def engine_failed(message: str) -> ApiError:
    """The engine gave up on an accepted request; the first line of what it said goes to the client, the rest to its log."""
    return ApiError(
        500,
        message.splitlines()[0][:200] if message else "The engine failed on this request.",
        kind="server_error",
        code="engine_error",
    )


def unavailable(message: str, retry_after_s: int, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after_s)})


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": str(retry_after_s)}
    )
