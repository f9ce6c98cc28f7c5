"""The objects that most subjects of a worker use."""

from __future__ import annotations

from typing import NamedTuple

from envhub_server.ipc.channel import Channel
from envhub_server.worker.failure_reports import FailureReports
from envhub_server.worker.host import Host
from envhub_server.worker.hosted_envs import HostedEnvs
from envhub_server.worker.progress_word import ProgressWord


class WorkerContext(NamedTuple):
    """The objects that the subjects of one worker share.

    Attributes:
        channel: to the hub.
        envs: those of the worker.
        host: the process in which they run.
        reports: of what they raise.
        progress: the worker's word in the arena.
    """

    channel: Channel
    envs: HostedEnvs
    host: Host
    reports: FailureReports
    progress: ProgressWord
