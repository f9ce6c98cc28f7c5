"""Values that cross between a program and a hub: calls, their results, options of a reset."""

from __future__ import annotations

from typing import Any

from envhub.errors import RemoteProtocolError
from envhub.protocol.prelude import Frame
from envhub.values import codec


class ValueCodec:
    """Encodes values for one hub, and decodes its own.

    Attributes:
        allow_pickle: whether what comes from the hub may be unpickled, for the hub is this program's own.
    """

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle

    def encode(self, value: object) -> bytes:
        """The value as it is sent to the hub; errors as for ``codec.encode``."""
        return codec.encode(value, codec.as_pickle if self.allow_pickle else codec.refuse)

    def decode(self, blob: Frame) -> Any:
        """The value that came from the hub.

        Raises:
            RemoteProtocolError: it is malformed, or breaks a limit of the codec.
            DecodeError: from the private hub, it cannot be unpickled.
        """
        try:
            return codec.decode(blob, self.allow_pickle)
        except codec.DecodeError as error:
            if self.allow_pickle:
                raise
            raise RemoteProtocolError(f"a value of the hub cannot be read: {error}") from error
