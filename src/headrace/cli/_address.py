"""Whether a server can listen where it was told to."""

from __future__ import annotations

import socket

from headrace.base.errors import InvalidInput


def check_address(host: str, port: int) -> None:
    """InvalidInput if the address cannot be taken; said before a model is loaded in vain."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will: a port at rest is free
            trial.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {reason}", field="port", remedy="choose another"
        ) from None
