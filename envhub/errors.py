"""The errors that EnvHub raises; client/docs/api.md says of each who must act.

Errors of the vector env's state machine, which also derive from Gymnasium's own, are in ``envhub.vector_errors``.
All arguments go to ``Exception.__init__``, so every error here can be pickled and copied.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from multiprocessing import TimeoutError as MultiprocessingTimeoutError
from typing import Any, Callable, Iterable, Sequence, TypeVar

from envhub.secret import SHOWN

FULL_TRACEBACKS = "ENVHUB_FULL_TRACEBACKS"  # a variable: if it is set, errors also show the library's frames

# For users of the ways to record that are no more.
ONLY_PROGRAMS_RECORD = (
    "episodes are recorded by the program that steps the envs: envhub.make_vec(..., record=FOLDER), "
    "see client/docs/recording.md"
)

# Control characters except tab and newline, and characters that reverse the direction of text: a terminal obeys them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# The folders of a path that is absolute or begins at a home, down to its last name. A quoted path may have spaces.
_FOLDERS = re.compile(r"""(?:(?<=file://)|(?<![\w./~-]))~?/(?:[^\s/"'<>|:;,()]+/)*(?=[^\s/])""")
_QUOTED_FOLDERS = re.compile(r"""(["'])~?/(?:[^"'\n]*/)?(?=[^"'\n/]+\1)""")

# A key or a token, what stands before the host of an address with one, and a name with a password. Names of hosts have
# no capital letters; a key without one, or without a small one, is one of 5 billion. One that looks like the long id of
# an env, of letters and a version, is one of 20 million. Texts of a hub, which can be long, go through this.
_MAY_BE_SECRET = re.compile(
    r"(?<![\w-])(?=[\w-]*[A-Z])(?=[\w-]*[a-z])(?!(?:[^\W\d]|-)+-v\d{1,2}(?![\w-]))[\w-]{43,}|(?i:envhub:/*)[^\s@*/]+"
    r"|(?<![^\s/@])(?=[^\s/@]+@)[^\s/@]*:[^\s/@]*(?=@)"
)


def printable(value: Any) -> Any:
    """The value, with control characters in its texts escaped for a terminal; containers and dataclasses are copied."""
    return _map_texts(
        value, lambda text: _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))
    )


def hide_folders_in(value: Any) -> Any:
    """The value, without the folders of absolute paths in its texts; it is copied as by ``printable``."""
    return _map_texts(value, lambda text: _FOLDERS.sub("", _QUOTED_FOLDERS.sub(r"\1", text)))


def hidden(text: str) -> str:
    """The text with ``***`` in place of what may be a secret."""
    return _MAY_BE_SECRET.sub(SHOWN, text)


def hide_secrets_in(value: Any) -> Any:
    """The value, with ``***`` in place of what may be a secret in its texts; it is copied as by ``printable``."""
    return _map_texts(value, hidden)


def shortened(text: str, chars_max: int) -> str:
    """The text, or its beginning up to the end of a word with an ellipsis if it is longer than ``chars_max``."""
    if len(text) <= chars_max:
        return text
    beginning = text[: chars_max - 1]
    words = re.match(r"(?s).*(?=\s)", beginning) if not text[chars_max - 1].isspace() else None
    if words and len(words[0]) > chars_max // 3:  # else the cut word is most of the text
        beginning = words[0]
    return f"{beginning.rstrip(' ,;:')}…"


def brief(value: object, chars_max: int = 100) -> str:
    """The ``repr`` of a value for a message, shortened to ``chars_max`` characters, without what may be a secret."""
    return shortened(hidden(repr(value)), chars_max)


def meant(name: str, names: Iterable[str]) -> str:
    """A question that names the one of these that is close to a name that does not exist; empty if none is."""
    import difflib  # which few programs need

    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]!r}?" if close else ""


def raised_text(type_name: str, message: str) -> str:
    """The last line of an exception's traceback."""
    name = type_name.rpartition(".")[2]
    return f"{name}: {message}" if message else name


def hub_at(address: str) -> str:
    """The hub at this address, for messages; the address of a private hub tells a reader nothing."""
    return "the private hub of this program" if address.startswith("ipc:///proc/") else f"the hub at {address}"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map_texts(item, change) for item in value])
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: _map_texts(item, change) for name, item in vars(value).items()})
    return value


class EnvHubError(Exception):
    """The base of every error that EnvHub itself raises.

    Attributes:
        hub: the name of the hub that the error comes from; None for an error of the client or of a private hub, and
            where the hub's name is not known.
        env_ids: of an error that ends a session, from ``recv``: the envs that are under way no more.
    """

    hub: str | None = None
    env_ids: Sequence[int] = ()


E = TypeVar("E", bound=EnvHubError)


def of_hub(error: E, hub: str | None) -> E:
    """The error, which now names the hub that it comes from."""
    error.hub = hub
    return error


class HubUnreachable(EnvHubError, ConnectionError):
    """No hub answered at the address within the time given."""


class HubLost(HubUnreachable):
    """The hub that held this session has ended, or has not been reachable for too long."""


class HubTimeout(EnvHubError, MultiprocessingTimeoutError, TimeoutError):
    """No reply came in time. The request goes on in the hub: the same wait can be called again."""


class SessionLost(EnvHubError):
    """The hub does not know this session (any longer): its lease ran out, or it was closed."""


class RequestRefused(EnvHubError):
    """The hub refuses to execute the request; the message says why and what to do."""


class ProtocolError(EnvHubError):
    """A message broke the rules of PROTOCOL.md."""


class LocalProtocolError(ProtocolError):
    """This side broke the protocol, or was stopped before it did."""


class ConnectionInUse(LocalProtocolError):
    """Another thread is using this connection at this moment; nothing was done."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that PROTOCOL.md does not allow."""


class VersionMismatch(ProtocolError):
    """The two sides speak different protocol versions; the message names both."""


class EnvRaised(EnvHubError):
    """An env's code raised in a worker.

    Attributes:
        env_index: the env's index in ``[0, num_envs)``, or None if the failure does not concern a single env.
        type_name: the remote exception's qualified name, such as ``builtins.ValueError``.
        remote_message: ``str()`` of the remote exception.
        remote_traceback: the remote traceback as text.
        worker: the worker's number in its session, or None.
        address: the address of the hub.
        replay: the name of the file on the hub's machine with which ``envhub replay`` runs the env to this exception
            again; empty if the hub keeps none.
    """

    def __init__(
        self,
        env_index: int | None,
        type_name: str,
        remote_message: str,
        remote_traceback: str = "",
        worker: int | None = None,
        address: str = "",
        replay: str = "",
    ) -> None:
        super().__init__(env_index, type_name, remote_message, remote_traceback, worker, address, replay)
        self.env_index = env_index
        self.type_name = type_name
        self.remote_message = remote_message
        self.remote_traceback = remote_traceback
        self.worker = worker
        self.address = address
        self.replay = replay

    def __str__(self) -> str:
        where = "an env" if self.env_index is None else f"env {self.env_index}"
        host = "" if self.worker is None else f" in worker {self.worker}"
        hub = f" of {hub_at(self.address)}" if self.address else ""
        text = f"{where}{host}{hub} raised {raised_text(self.type_name, self.remote_message)}"
        if self.replay:
            text += f"\n\n{replay_text(self.replay)}"
        return f"{text}\n\nRemote traceback:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else text


def replay_text(replay: str) -> str:
    """The command that runs a failure again, in a sentence."""
    return f"On the hub's machine `envhub replay {replay}` runs it again."


def raised_by_env(error: BaseException) -> EnvRaised | None:
    """The exception that an env raised in a worker, for which the client raised this error."""
    raised = error if isinstance(error, EnvRaised) else error.__cause__
    return raised if isinstance(raised, EnvRaised) else None


def env_of(error: BaseException) -> int | None:
    """The env that the error of a wait is of; None where it is of no single env."""
    env: int | None = getattr(raised_by_env(error) or error, "env_index", None)
    return env


def ended_by(error: BaseException) -> Sequence[int]:
    """The envs whose result this error of ``recv`` is."""
    if (env := env_of(error)) is not None:
        return (env,)
    return error.env_ids if isinstance(error, EnvHubError) else ()


class WorkerDied(EnvHubError):
    """A worker process of the session ended; its envs are built again, and other envs continue.

    Attributes:
        env_index: an env of that worker; from ``recv``, the env whose result this is. None if the hub does not name it.
    """

    env_index: int | None = None


class RestartsExhausted(WorkerDied):
    """A worker ended, or failed to build its envs, too often; the session has failed, the hub continues."""


class EnvTimeout(EnvHubError, TimeoutError):
    """An env did not finish in time. Its worker was ended; the message has the stacks of its threads.

    Attributes:
        env_index: as in ``WorkerDied``; the message names the env that was late.
    """

    env_index: int | None = None


class SnapshotRefused(EnvHubError):
    """No snapshot can be taken of an env, or an env cannot be restored from this one; nothing has changed."""


class SnapshotLimit(SnapshotRefused):
    """There are as many snapshots as there may be."""


class SnapshotLost(EnvHubError):
    """A snapshot cannot be used any more: it was dropped, or its process has ended. The envs are as they were."""


class AddressError(EnvHubError, ValueError):
    """An address that cannot be used; the message says why and what to do."""


class AccessDenied(EnvHubError, PermissionError):
    """The hub has said that it does not let this client in: its key is missing, unknown, removed or only observes."""


class KeysError(EnvHubError, ValueError):
    """A key, or a file of keys, that cannot be used; the message says why and what to do."""


class SpaceMismatch(EnvHubError, ValueError):
    """The count or shape of the actions does not fit the action space; no env has moved."""


class UnsupportedSpace(EnvHubError, TypeError):
    """A space that EnvHub cannot send over the network."""


class Forked(EnvHubError):
    """A client object from before a fork was used in the child; sockets and sessions do not survive a fork."""


_NAMES = {"darwin": "macOS", "win32": "Windows"}


def only_linux(what: str) -> str:
    """The sentence that this needs Linux, and what works on this system."""
    system = _NAMES.get(sys.platform, sys.platform)
    works = 'pass the tcp:// or envhub:// address of a hub on Linux, as in make_vec(..., hub="tcp://...")'
    return f"{what} needs Linux, and this is {system}: {works} (client/docs/remote_hubs.md)"
