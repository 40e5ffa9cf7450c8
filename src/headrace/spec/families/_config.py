"""A typed reader over a `config.json`: null means absent, several spellings may be given, errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from headrace.base.errors import InvalidInput


class _Required:
    pass


REQUIRED = _Required()


class Config:
    """Reads keys of one config. The first spelling that is present and not null wins; without a default a key is required."""

    def __init__(self, raw: Mapping[str, Any], name: str = "") -> None:
        self.raw = raw
        self.name = name

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type", ""))

    def get(self, *keys: str) -> Any:
        """The raw value of the first key that is present and not null, else None."""
        for key in keys:
            if (value := self.raw.get(key)) is not None:
                return value
        return None

    @overload
    def integer(self, *keys: str, minimum: int = 1) -> int: ...
    @overload
    def integer(self, *keys: str, default: int, minimum: int = 1) -> int: ...
    @overload
    def integer(self, *keys: str, default: None, minimum: int = 1) -> int | None: ...
    def integer(self, *keys: str, default: int | _Required | None = REQUIRED, minimum: int = 1) -> int | None:
        value = self._find(keys, default)
        if value is None or isinstance(value, _Required):
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(f"{keys[0]} must be a whole number, got {value!r}", field=keys[0])
        if value < minimum and value != default:
            raise InvalidInput(f"{keys[0]} must be at least {minimum}, got {value}", field=keys[0])
        if value > 1 << 40:
            raise InvalidInput(f"{keys[0]} is absurdly large: {value}", field=keys[0])
        return value

    @overload
    def number(self, *keys: str) -> float: ...
    @overload
    def number(self, *keys: str, default: float) -> float: ...
    @overload
    def number(self, *keys: str, default: None) -> float | None: ...
    def number(self, *keys: str, default: float | _Required | None = REQUIRED) -> float | None:
        value = self._find(keys, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise InvalidInput(f"{keys[0]} must be a number, got {value!r}", field=keys[0])
        return float(value)

    def flag(self, *keys: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._find(keys, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{keys[0]} must be true or false, got {value!r}", field=keys[0])
        return value

    def text(self, *keys: str, default: str | _Required = REQUIRED) -> str:
        value = self._find(keys, default)
        if not isinstance(value, str):
            raise InvalidInput(f"{keys[0]} must be a string, got {value!r}", field=keys[0])
        return value

    def table(self, *keys: str) -> Mapping[str, Any] | None:
        """A nested object, or None where it is absent, null or empty."""
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InvalidInput(f"{keys[0]} must be an object, got {value!r}", field=keys[0])
        return value or None

    def texts(self, *keys: str) -> list[str] | None:
        """A list of strings, or None where absent."""
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise InvalidInput(f"{keys[0]} must be a list of strings, got {value!r}", field=keys[0])
        return list(value)

    def integers(self, *keys: str) -> list[int] | None:
        """A list of whole numbers (a single one counts as a list), or None where absent."""
        value = self.get(*keys)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            return [value]
        if not isinstance(value, list | tuple) or not all(
            isinstance(v, int) and not isinstance(v, bool) for v in value
        ):
            raise InvalidInput(f"{keys[0]} must be a list of whole numbers, got {value!r}", field=keys[0])
        return list(value)

    def nested(self, key: str) -> Config:
        """The reader of a sub-config such as `text_config`."""
        sub = self.table(key)
        if sub is None:
            raise InvalidInput(f"{key} is missing", field=key)
        return Config(sub, self.name)

    def _find(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.get(*keys)
        if value is None:
            if default is REQUIRED:
                raise InvalidInput(
                    f"{keys[0]} is missing from the {self.model_type or 'model'} config",
                    field=keys[0],
                    remedy="add it to config.json" + (f" (or one of: {', '.join(keys[1:])})" if keys[1:] else ""),
                )
            return default
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """The same config where absent keys have the values of `defaults`."""
        present = {key: value for key, value in self.raw.items() if value is not None}
        return Config({**defaults, **present}, self.name)

    def without(self, *keys: str) -> Config:
        """The same config without some keys."""
        return Config({key: value for key, value in self.raw.items() if key not in keys}, self.name)
