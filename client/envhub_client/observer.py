"""Observing a session that another process holds: what its envs showed last, or draw now, without a change to them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import numpy as np

from envhub.errors import RemoteProtocolError, hub_at
from envhub.protocol.client import Reply
from envhub.protocol.messages import Observe, Observed, Op
from envhub.values import codec, spaces
from envhub_client.connection.connection import Connection
from envhub_client.envs.observations import Observations
from envhub_client.frames import hiding_frames
from envhub_client.lanes.base import check_observed, observed_arrays

_COLOURS = {1: 0, 3: 2, 4: 6}  # by the number of channels, what PNG calls grey, RGB and RGBA


class Seen(NamedTuple):
    """Last observations of a session's envs.

    Attributes:
        observations: batched as by ``step``, and the caller's own; leaves of no fixed size are None.
        steps: int64 ``(num_envs,)``: how many steps and resets each env has had.
        given: bool ``(num_envs,)``: an env that stepped too quickly to be read is not given, and its part is zero.
    """

    observations: Any
    steps: np.ndarray
    given: np.ndarray


class Observer(AbstractContextManager["Observer"]):
    """An observer of a session, usable in ``with``. The trainer that holds the session neither notices nor waits."""

    @hiding_frames
    def __init__(self, connection: Connection, token: bytes, timeout: float) -> None:
        """Observe the session of this token by a connection that is the observer's from now on."""
        self._connection = connection
        self._token = token
        self._timeout = timeout
        try:
            first: Observed = self._ask(described=False).message
            check_observed(first, first.num_envs)
            space = spaces.build(codec.decode(first.observation_spaces[0]), spaces.SPACE_BYTES_MAX // first.num_envs)
        except (ValueError, IndexError) as error:
            connection.close()
            raise RemoteProtocolError(f"{hub_at(connection.address)} describes no session: {error}") from error
        except BaseException:
            connection.close()
            raise
        self.num_envs = first.num_envs
        self.single_observation_space = space
        self._observations = Observations(space, first.num_envs, allow_pickle=False)

    def _ask(self, described: bool) -> Reply:
        return self._connection.ask(Op.OBSERVE, Observe(self._token, described), timeout=self._timeout)

    @hiding_frames
    def observe(self) -> Seen:
        """Observations of the envs now.

        Raises:
            SessionLost: the session has ended, or was taken over and goes by another token.
            HubTimeout, HubLost: as every question to a hub.
        """
        return seen(self._ask(described=True), self.num_envs, self._observations)

    def close(self) -> None:
        """Close the connection; the session does not notice."""
        self._connection.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def seen(reply: Reply, num_envs: int, observations: Observations) -> Seen:
    observed: Observed = reply.message
    try:
        arrays = [*map(np.ndarray.copy, observed_arrays(reply, num_envs, observations.leaves))]
    except ValueError as error:
        raise RemoteProtocolError(f"what was observed does not fit the session: {error}") from error
    return Seen(observations.batch(arrays), np.array(observed.steps, np.int64), np.array(observed.given, np.bool_))


def token_bytes(token: str) -> bytes:
    """The bytes of a session's token as ``detach`` returned it, or of the name that ``sessions`` shows."""
    parsed = b""
    with suppress(ValueError, TypeError):
        parsed = bytes.fromhex(token)
    if len(parsed) not in (4, 16):
        # What was given may be nearly a token, and so is not repeated.
        text = (
            "a session's token is 32 hexadecimal digits, as detach returned it; its name is 8, as sessions() shows it"
        )
        raise ValueError(text)
    return parsed


class Frame(NamedTuple):
    """A picture of an env."""

    pixels: np.ndarray  # bytes of shape (height, width, channels), of 1, 3 or 4 channels
    source: str  # "render", or "observation" of an env that draws no frames

    @classmethod
    def of_row(cls, row: dict[str, Any], frames: Sequence[Any]) -> Frame:
        """The frame in a hub's answer; raises ``RemoteProtocolError``."""
        try:
            pixels = np.frombuffer(frames[0], np.uint8).reshape(row["shape"])
            if pixels.ndim != 3 or pixels.shape[2] not in _COLOURS or not pixels.size:
                raise ValueError(f"a frame of shape {pixels.shape}")
            return cls(pixels, str(row["source"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the hub sent what is no frame: {error}") from error

    def png(self) -> bytes:
        """The frame as a PNG file."""
        height, width, channels = self.pixels.shape
        lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
        lines[:, 1:] = self.pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
