"""Every event of the hub's log; ``server/docs/log_events.md`` is made of this table.

``python -m envhub_server.log_events`` prints the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LogEvent:
    """One event.

    Attributes:
        meaning: what has happened, and what follows from it, as Markdown.
        levels: those at which it is logged; an event has several where it may be expected or not.
        fields: of its line, besides the time, the level and the event.
        repeats: the fields of which equal ones have one line in 10 s; None where each line is written.
    """

    meaning: str
    levels: tuple[str, ...]
    fields: tuple[str, ...] = ()
    repeats: tuple[str, ...] | None = None


_DEBUG, _INFO, _WARNING, _ERROR = ("debug",), ("info",), ("warning",), ("error",)

LOG_EVENTS: Mapping[str, LogEvent] = {
    # The hub.
    "hub_started": LogEvent(
        "The hub listens. `configuration` has the settings that differ from the defaults",
        _INFO,
        ("name", "version", "pid", "addresses", "configuration"),
    ),
    "hub_suspended": LogEvent(
        "The hub goes on after it was stopped, as by SIGSTOP or a suspended machine. No deadline has run meanwhile",
        _WARNING,
        ("stopped_s", "note"),
    ),
    "stopping": LogEvent(
        "The hub was told to stop, by the signal or for the reason `why`; a second line is of a second signal",
        _INFO,
        ("why", "sessions"),
    ),
    "stack": LogEvent(
        "The Python stack of a thread of the hub, after SIGUSR1 or SIGQUIT", _INFO, ("signal", "thread", "stack")
    ),
    "counters": LogEvent("The counters of `stats()`, after SIGUSR2", _INFO, ("signal", "...")),
    "internal_error": LogEvent(
        "A bug in the hub: please report the line. A session that it concerns is ended",
        _ERROR,
        ("session", "op", "error", "history", "exception"),
        repeats=("error",),
    ),
    "descriptors_short": LogEvent(
        "Too few descriptors are left: new clients wait until there are more", _ERROR, ("used", "limit", "note")
    ),
    "descriptors_back": LogEvent(
        "Enough descriptors are left again: new clients are let in", _WARNING, ("used", "limit")
    ),
    "socket_swap_failed": LogEvent(
        "The socket at an ipc address could not be replaced by one that lets clients wait, or put back",
        _WARNING,
        ("path", "why"),
    ),
    "side_socket_missing": LogEvent(
        "The side socket of an ipc address cannot be opened: clients step by messages", _WARNING, ("path", "why")
    ),
    "side_socket_refused": LogEvent(
        "A process of another user came to the side socket, and was refused", _WARNING, ("pid", "uid"), repeats=("uid",)
    ),
    "proxy_ended": LogEvent(
        "The process that accepts tcp connections has ended, or could not be started; another is started",
        ("warning", "error"),
        ("status", "why", "note"),
    ),
    "step_costs_unread": LogEvent(
        "The file of what steps take cannot be read; it counts as empty", _WARNING, ("path", "error")
    ),
    "step_costs_unwritten": LogEvent("The file of what steps take cannot be written", _WARNING, ("path", "error")),
    # Clients and keys.
    "connected": LogEvent(
        "A client was let in, and has sent its first message",
        _INFO,
        ("client", "host", "audit"),
        repeats=("client", "host"),
    ),
    "disconnected": LogEvent(
        "The last connection of a client has ended", _INFO, ("client", "host", "audit"), repeats=("client", "host")
    ),
    "client_refused": LogEvent(
        "A client was not let in: it has no key, or an unknown one, or one for another hub",
        _WARNING,
        ("host", "why", "audit"),
        repeats=("why", "host"),
    ),
    "request_refused": LogEvent(
        "A request of a client was refused; one to another client's session has it as `owner`",
        _WARNING,
        ("client", "host", "op", "session", "owner", "why", "audit"),
        repeats=("client", "op", "session", "why"),
    ),
    "handshake_unfinished": LogEvent(
        "A connection ended before its client had shown a key, or failed to: it may look whether its hub is back",
        _INFO,
        ("host", "why", "audit"),
        repeats=("why", "host"),
    ),
    "connection_ended": LogEvent(
        "The hub ended a connection, for the reason `why`",
        _WARNING,
        ("client", "host", "why", "audit"),
        repeats=("client", "why"),
    ),
    "client_lost": LogEvent(
        "A session's client is out of reach: the lease of the session begins", _WARNING, ("session", "why", "lease_s")
    ),
    "client_back": LogEvent("A session's client is heard again: its lease ends", _INFO, ("session",)),
    "reply_parked": LogEvent("A reply could not be sent; it is kept until the client asks for it", _DEBUG, ("error",)),
    "keys_read": LogEvent("The file of a client's keys has changed; `why` says how", _INFO, ("client", "why", "audit")),
    "keys_unreadable": LogEvent(
        "A file of keys cannot be used: the keys read before stay, or the file is ignored, as `note` says",
        ("warning", "error"),
        ("why", "note"),
    ),
    # What is offered.
    "env_unready": LogEvent("An env cannot be made now; `why` says what to do", _ERROR, ("env", "why")),
    "env_ready": LogEvent("An env that was unready can be made", _INFO, ("env",)),
    "env_starting": LogEvent("The interpreter or the import of an env takes longer than 1 s", _INFO, ("env", "why")),
    "env_names_unknown": LogEvent(
        "The worker that lists the envs of an interpreter has ended, or could not be started", _WARNING, ("why",)
    ),
    "module_failed": LogEvent(
        "The import of a module that an env names raised an exception", _WARNING, ("type", "why")
    ),
    "module_shadowed": LogEvent(
        "A module of the hub's folder is not imported, since an installed one has its name",
        _WARNING,
        ("module", "file", "used", "note"),
    ),
    "folder_unsafe": LogEvent(
        "Another user may write to, or owns, a folder from which modules are imported, or would be",
        _WARNING,
        ("folder", "why", "note"),
    ),
    # Sessions.
    "session_made": LogEvent(
        "A client makes a session. `factories` is the SHA-256 of those that it sent",
        _INFO,
        ("session", "client", "host", "env", "num_envs", "factories", "audit"),
    ),
    "session_making": LogEvent(
        "The number of envs that a session has built, and what its workers do if that takes long",
        _INFO,
        ("session", "phase", "built", "num_envs", "doing"),
        repeats=("session", "phase", "built", "doing"),
    ),
    "session_ready": LogEvent(
        "The envs of a session are made, or were taken over; `why` is the reason for the number of workers",
        _INFO,
        ("session", "num_workers", "why"),
    ),
    "session_taken_over": LogEvent(
        "A client took the session of `owner` over, whose name is `by` from now on",
        _INFO,
        ("session", "client", "host", "owner", "by", "audit"),
    ),
    "session_unknown": LogEvent(
        "A client named a session that the hub has not, as after the hub was started again; nothing was done",
        _INFO,
        ("client", "host", "session", "why", "audit"),
        repeats=("client", "why"),
    ),
    "session_expired": LogEvent("The lease of a session ran out: its envs are closed", _INFO, ("session", "lease_s")),
    "session_revoked": LogEvent(
        "A session is ended, since the key of its client was removed", _WARNING, ("session", "client", "why")
    ),
    "envs_closing": LogEvent(
        "Envs are slow to close; `note` says which, and what they execute. Their client is told",
        _WARNING,
        ("session", "note"),
    ),
    "envs_cut_short": LogEvent(
        "The processes of envs ended before these had closed; `note` says which, and why. Their client is told",
        _WARNING,
        ("session", "note"),
    ),
    "session_ended": LogEvent(
        "A session has ended, and all that it had is freed", _INFO, ("session", "client", "audit")
    ),
    "request_failed": LogEvent(
        "A request failed; where an env raised, with the `env`, the class of the exception and its `replay`",
        _WARNING,
        ("session", "code", "env", "why", "replay"),
        repeats=("session", "code"),
    ),
    "stale_answer_dropped": LogEvent(
        "A worker answered a request that has ended, as a process that an env forked does",
        _WARNING,
        ("session", "worker", "message", "of"),
        repeats=("session", "worker", "message"),
    ),
    "attribute_not_kept": LogEvent(
        "The values of an attribute are too large to be set again on envs that are built again",
        _WARNING,
        ("session", "name"),
        repeats=("session",),
    ),
    "info_dropped": LogEvent(
        "An info of an env was larger than allowed, and was replaced",
        _WARNING,
        ("session", "env", "info_bytes", "info_bytes_max"),
    ),
    # Workers.
    "worker_started": LogEvent("A worker process runs", _INFO, ("session", "worker", "pid")),
    "worker_exited": LogEvent(
        "A worker process has ended, or could not be started; `why` is the limit for which the hub ended it",
        ("info", "warning"),
        ("session", "worker", "how", "why"),
    ),
    "worker_recycled": LogEvent(
        "Another worker has taken over from one that has served for long enough", _INFO, ("session", "worker")
    ),
    "spare_used": LogEvent("A spare has taken the place of a worker that ended", _INFO, ("session", "worker")),
    "worker_count_unsuitable": LogEvent(
        "The session would be faster with another number of workers", _WARNING, ("session", "note")
    ),
    "processes_shared": LogEvent(
        "There is no room for a process per env: envs share processes", _WARNING, ("session", "note")
    ),
    "process_state_shared": LogEvent(
        "Envs that share a process change what they have in common", _WARNING, ("session", "note")
    ),
    "envs_separated": LogEvent(
        "A second env could not be made in a process: each env gets its own", _WARNING, ("session", "worker", "why")
    ),
    "env_late": LogEvent(
        "An env is slow: at first as a warning; as an error at its deadline, at which it counts as hung",
        ("warning", "error"),
        ("session", "env", "at", "waited_s", "limit_s"),
    ),
    "env_rebuilt": LogEvent(
        "An env raised, or gave what is invalid: it is built again in its worker",
        _WARNING,
        ("session", "env", "why"),
        repeats=("session",),
    ),
    "env_suspicious": LogEvent("An env does what it should not; it goes on", _WARNING, ("session", "env", "why")),
    "zygote_replaced": LogEvent("The process that forks workers had ended; another was started", _WARNING, ("pid",)),
    "zygote_ended": LogEvent("The process that forks workers has ended, and no other is started now", _ERROR, ("why",)),
    "libraries_not_shared": LogEvent(
        "Libraries could not be imported once for all workers: each imports them", _WARNING, ("libraries", "why")
    ),
    "orphan_sweep_failed": LogEvent(
        "Processes that envs have left could not be looked for; that is tried again when the next process ends",
        _WARNING,
        ("why",),
    ),
    "output": LogEvent("What a worker printed", _INFO, ("session", "worker", "pid", "stream", "text")),
    "output_dropped": LogEvent(
        "What workers printed is lost, since the hub's stream was not read", _WARNING, ("stream", "bytes")
    ),
    # Recordings and replays.
    "recorded": LogEvent(
        "A session's recording is complete", _INFO, ("session", "folder", "episodes", "nbytes", "dropped")
    ),
    "not_recorded": LogEvent("A session is not recorded", ("info", "warning"), ("session", "why")),
    "env_not_recorded": LogEvent(
        "An env of a session is not recorded", _WARNING, ("session", "env", "why"), repeats=("session", "env")
    ),
    "recording_ended": LogEvent("Nothing more of a session is recorded", _WARNING, ("session", "folder", "why")),
    "journal_not_made": LogEvent(
        "A worker keeps no journal, so that its failures have no replays", _WARNING, ("session", "worker", "why")
    ),
    "replay_not_kept": LogEvent("The replay of a failure is not kept", _WARNING, ("replay", "why"), repeats=("why",)),
}

_HEAD = """# Log events

A hub writes a line to stderr for each of these events: JSON where stderr is no terminal. Each line has the `event`, its
`level` and a `timestamp`. The fields below are there as far as they are known. Lines with
`audit` say who did what, see [keys](keys.md#the-audit). A private hub writes errors only.

| event | level | meaning | fields |
|---|---|---|---|
"""
_BETWEEN = """
Of these events, lines that are equal in the fields named here are written once in 10 s:

| event | equal fields |
|---|---|
"""


def page() -> str:
    """The page of all events, as Markdown."""
    logged = [
        f"| `{name}` | {' or '.join(e.levels)} | {e.meaning} | {_listed(e.fields)} |" for name, e in LOG_EVENTS.items()
    ]
    repeated = [f"| `{name}` | {_listed(e.repeats)} |" for name, e in LOG_EVENTS.items() if e.repeats is not None]
    return "\n".join([_HEAD + "\n".join(logged), _BETWEEN + "\n".join(repeated), ""])


def _listed(fields: tuple[str, ...]) -> str:
    return ", ".join(name if name == "..." else f"`{name}`" for name in fields)


if __name__ == "__main__":
    print(page(), end="")
