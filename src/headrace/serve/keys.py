"""API keys: where they come from, and the check on every request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import InvalidInput
from headrace.serve.errors import ApiError


def load_keys(options: Sequence[str], environment: str | None, file: Path | None) -> tuple[str, ...]:
    """All keys of the command line, of `HEADRACE_API_KEY` (comma-separated) and of a file (one a line, # comments).

    Raises `InvalidInput` for a file that cannot be read or holds no key, so a mistake never opens the server.
    """
    keys = [key.strip() for key in options]
    if any(not key for key in keys):
        raise InvalidInput("the key is empty", field="api_key")
    if environment is not None:
        named = [key.strip() for key in environment.split(",") if key.strip()]
        if not named:
            raise InvalidInput("the environment variable holds no key", field="HEADRACE_API_KEY", remedy="unset it")
        keys += named
    if file is not None:
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot read keys from {file}: {error}", field="api_key_file") from None
        listed = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not listed:
            raise InvalidInput(f"{file} holds no key", field="api_key_file")
        keys += listed
    return tuple(dict.fromkeys(keys))


class KeyRing:
    """Compares a presented key with all known ones in time that depends on neither."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def open(self) -> bool:
        """No keys: everyone may enter."""
        return not self._digests

    def admits(self, presented: bytes) -> bool:
        digest = _digest(presented)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return self.open or any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireKey:
    """Answers 401 to requests without a known `Authorization: Bearer` key, except for `open_paths`."""

    def __init__(
        self, app: ASGIApp, ring: KeyRing, open_paths: Sequence[str], refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._ring = ring
        self._open_paths = tuple(open_paths)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._ring.open or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        presented = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = presented.partition(b" ")
        if scheme.lower() == b"bearer" and self._ring.admits(key.strip()):
            await self._app(scope, receive, send)
            return
        message = (
            "This API key is not known here."
            if key
            else "An API key is needed: send it in the header `Authorization: Bearer <key>`."
        )
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        self._refused(error)
        await error.response()(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] == "OPTIONS" or any(
            path == known or (known.endswith("/") and path.startswith(known)) for known in self._open_paths
        )
