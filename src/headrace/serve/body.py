"""Reading a request body under a limit, without ever holding more than the limit."""

from __future__ import annotations

from starlette.types import Receive, Scope

from headrace.serve.errors import ApiError, bad_field


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body. `ApiError` 413 as soon as its announced or received length exceeds the limit."""
    announced = dict(scope["headers"]).get(b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    received = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        received += len(chunk)
        if received > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def require_json(scope: Scope) -> None:
    """415 for a body that says it is compressed or something else than JSON; a missing header is taken as JSON."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        text = f"Send the body as it is: Content-Encoding {encoding.decode('latin-1')} is not taken."
        raise ApiError(415, text, code="unsupported_media_type", headers={"Accept-Encoding": "identity"})
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise ApiError(
            415,
            "Send the body as application/json: with the header Content-Type: application/json.",
            code="unsupported_media_type",
        )


def require_post(scope: Scope) -> None:
    if scope["method"] != "POST":
        raise ApiError(405, "Use POST here.", code="method_not_allowed", headers={"Allow": "POST"})


def _too_large(limit_bytes: int) -> ApiError:
    error = bad_field(None, f"The body is larger than this server's limit of {limit_bytes} bytes.", "body_too_large")
    error.status = 413
    return error
