"""The results in a hub's reply to a call."""

from __future__ import annotations

from collections.abc import Sequence

from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, unpack_rows
from envhub.protocol.prelude import Frame
from envhub_client.connection.connection import Connection


def results_of(call: Call, reply: Reply, num_envs: int, connection: Connection) -> dict[int, Frame]:
    """The encoded result of each row of the call, or of all ``num_envs`` if it names none, in the reply that came so.

    Raises:
        RemoteProtocolError: the reply does not have one of each of them.
    """
    wanted = call.rows or range(num_envs)
    try:
        if len(reply.frames) == 1:
            results: Sequence[tuple[int, Frame]] = unpack_rows(reply.frames[0], num_envs)
        else:
            results = [*zip(wanted, reply.frames, strict=True)]
        if [row for row, _ in results] != [*wanted]:
            raise ValueError(f"results of envs {[row for row, _ in results]}")
    except ValueError as error:
        raise connection.breach(f"a reply to CALL does not fit the session: {error}") from error
    return dict(results)
