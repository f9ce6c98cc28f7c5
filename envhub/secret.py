"""``Secret``: a key, or a text with a key in it, which is never shown or written by accident."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, SupportsIndex, TypeVar

Value = TypeVar("Value", bytes, str)

SHOWN = "***"


class Secret(Generic[Value]):
    """Bytes or a text that only ``reveal_secret`` returns; its text is ``***``, and it cannot be pickled or encoded.

    A test lists the modules that may call ``reveal_secret``. A secret has no ``bytes()``, length or hash.
    """

    __slots__ = ("_hidden",)
    __hash__ = None  # type: ignore[assignment]  # a hash of few possible values tells which one it is

    def __init__(self, value: Value) -> None:
        self._hidden: Value = value

    def reveal_secret(self) -> Value:
        """The value itself, for a socket, a file of keys, or the one output that must contain it."""
        return self._hidden

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        import hmac  # it loads OpenSSL, which a program without keys does not need

        return hmac.compare_digest(_bytes(self._hidden), _bytes(other._hidden))

    def __repr__(self) -> str:
        return SHOWN

    def __format__(self, _: str) -> str:
        return SHOWN

    def __deepcopy__(self, _: Any = None) -> Secret[Value]:
        return self

    __copy__ = __deepcopy__

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise TypeError("a key is not pickled: name the hub as `envhub login` keeps it, and connect where it is used")

    def __getstate__(self) -> NoReturn:
        self.__reduce_ex__(0)


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
