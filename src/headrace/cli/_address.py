"""Whether a server can listen where it was told to."""

from __future__ import annotations

import errno
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
        field = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        reason = error.strerror or str(error)
        raise InvalidInput(f"cannot listen on {host}:{port}: {reason}", field=field, remedy="choose another") from None
