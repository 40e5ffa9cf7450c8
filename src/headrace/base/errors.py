"""Errors that a user can act on: each names what was wrong and, where there is one, the remedy."""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error Headrace raises on purpose.

    `field` names the option, request field, config key or tensor at fault; `remedy` says what to do about it.
    """

    def __init__(self, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        text = self.message if self.field is None or self.field in self.message else f"{self.field}: {self.message}"
        return text if self.remedy is None else f"{text} ({self.remedy})"


class InvalidInput(HeadraceError):
    """The caller's input is wrong: an option, a request field, a config value. Maps to HTTP 400 and exit code 2."""


class UnsupportedModel(HeadraceError):
    """The model is well-formed but uses something that the part asked does not support."""


class CorruptCheckpoint(HeadraceError):
    """A weights file is missing, truncated or disagrees with its config; `field` is the tensor or file."""


class DoesNotFit(HeadraceError):
    """Memory is too small for what was asked; the message gives the numbers and `remedy` a setting that fits."""


class EngineDead(HeadraceError):
    """The engine process ended while work was in flight."""
