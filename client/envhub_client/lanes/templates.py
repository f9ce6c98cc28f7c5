"""The forms of one session's infos, which the hub describes once each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envhub.protocol.messages import Op, TemplatesRequest
from envhub.values import codec
from envhub.values.info_columns import NotInColumns, Rows, Template
from envhub_client.batch import InfoGroup
from envhub_client.connection.connection import Connection
from envhub_client.deadline import Deadline, answer_timeout

TEMPLATES_MAX = 4096  # forms; beyond that all are forgotten, and those in use are asked for again


class InfoTemplates:
    """The forms that the hub has described, by number."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._templates: dict[int, Template] = {}

    def read(self, columns: Sequence[Rows], deadline: Deadline | None = None) -> list[InfoGroup]:
        """The infos in these rows; asks the hub for forms that were not seen before.

        Raises:
            HubTimeout: it does not answer in time; read them again.
            RemoteProtocolError: it does not know them, or they are not what is in the rows.
            EnvHubError: the session has failed or ended.
        """
        if unknown := [rows.template for rows in columns if rows.template not in self._templates]:
            if len(self._templates) + len(unknown) > TEMPLATES_MAX:
                self._templates.clear()
                unknown = [rows.template for rows in columns]
            request, timeout = TemplatesRequest(unknown), answer_timeout(deadline)
            reply = self._connection.ask(Op.TEMPLATES, request, timeout=timeout).message
            try:
                for number, example in zip(reply.numbers, reply.examples, strict=True):
                    self._templates[number] = Template(codec.decode(example))
            except (ValueError, TypeError, AttributeError, NotInColumns) as error:
                raise self._connection.breach(f"a template of infos cannot be read: {error}") from error
        return [self._group(*rows) for rows in columns]

    def _group(self, number: int, rows: np.ndarray, data: np.ndarray) -> InfoGroup:
        template = self._templates.get(number)
        if template is None or data.shape[1] != template.nbytes:
            raise self._connection.breach(
                f"infos of an unknown form, {number}, or of another size: {data.shape[1]} bytes"
            )
        return InfoGroup(template, rows, np.frombuffer(np.ascontiguousarray(data), template.dtype))
