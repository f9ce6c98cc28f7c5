"""The attributes that a program has set in its envs, which are set again where the envs are made again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from envhub import errors
from envhub.protocol.messages import Op, SetAttr
from envhub_client.connection.connection import Connection

log = logging.getLogger("envhub")


class AttributesSet:
    """The attributes that were set, by name and rows, in the order in which they were set last."""

    def __init__(self) -> None:
        self._messages: dict[tuple[object, ...], SetAttr] = {}

    def remember(self, message: SetAttr) -> None:
        """Have this attribute set again in all envs to come, after those that were set before."""
        key = message.name, *message.rows
        self._messages.pop(key, None)
        self._messages[key] = message

    def set_again(
        self, connection: Connection, own: Callable[[SetAttr], SetAttr | None] = lambda message: message
    ) -> None:
        """Set all of them in the session of this connection; ``own`` takes its rows out of a message.

        An attribute that cannot be set again is left out, with a warning.

        Raises:
            HubLost: the hub is lost.
            Exception: from a signal handler.
        """
        for message in filter(None, map(own, [*self._messages.values()])):  # others may be set meanwhile
            try:
                connection.ask(Op.SET_ATTR, message)
            except errors.HubLost:
                raise
            except Exception as error:
                if not isinstance(errors.raised_by_env(error) or error, errors.EnvHubError):
                    raise
                log.warning("the attribute %r cannot be set again: %s", message.name, error)
