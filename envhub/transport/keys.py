"""Keys of CURVE as text, and the files that keep them.

A key has 32 bytes. As text it is base64 with ``-`` and ``_``, without padding: 43 characters.
"""

from __future__ import annotations

import base64
import os
import stat
import sys
from pathlib import Path

from envhub.errors import KeysError
from envhub.frozen import Frozen
from envhub.secret import Secret, hidden

KEY_BYTES = 32
KEY_TEXT_CHARS = 43
SECRET_FILE_BYTES_MAX = 1 << 14
NOT_SHOWN = "what was given"
if sys.platform == "win32":
    _FLAGS = getattr(os, "O_BINARY", 0)  # without it a line would end otherwise than it is written
    _NO_FOLLOW = 0
else:
    _FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
    _NO_FOLLOW = os.O_NOFOLLOW
_SHOWN_CHARS_MAX = 200


class HubKeys(Frozen):
    """The keys that a client connects with: the hub's public key, and its own secret key."""

    server: bytes
    secret: Secret[bytes]


def text_of(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


def key_of(text: str, keys: int = 1) -> bytes:
    """The key, or this number of joined keys, in a text of ``text_of``.

    Raises:
        KeysError: the text is not a key; the message does not repeat the text, which may be a secret.
    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if len(raw) != keys * KEY_BYTES:
        raise KeysError(f"this is no key: {keys * KEY_BYTES} bytes of base64 are wanted, see that all was copied")
    return raw


def secret_key_of(text: Secret[str]) -> Secret[bytes]:
    """The secret key in a text of ``secret_text_of``; errors as in ``key_of``."""
    return Secret(key_of(text.reveal_secret()))


def secret_text_of(key: Secret[bytes]) -> Secret[str]:
    return Secret(text_of(key.reveal_secret()))


def token_of(keys: HubKeys) -> Secret[str]:
    """The part of an ``envhub://`` address before the ``@``."""
    return Secret(text_of(keys.server + keys.secret.reveal_secret()))


def keys_of(token: str) -> HubKeys:
    both = key_of(token, 2)
    return HubKeys(both[:KEY_BYTES], Secret(both[KEY_BYTES:]))


def quoted(text: str) -> str:
    """Quote what a user has given, for an error; a text that may contain a secret is not repeated."""
    is_plain = "@" not in text and hidden(text) == text and len(text) <= _SHOWN_CHARS_MAX
    return repr(text) if is_plain else NOT_SHOWN


def write_secret(path: Path, text: Secret[str] | str, replace: bool = False) -> None:
    """Write a line into a new file that only this user can read; with ``replace`` the file may exist.

    Raises ``KeysError``.
    """
    import secrets

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _FLAGS, 0o600)
        try:
            try:
                line = text.reveal_secret() if isinstance(text, Secret) else text
                os.write(descriptor, line.encode() + b"\n")
            finally:
                os.close(descriptor)  # Windows neither renames nor removes a file that is open
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error}") from error


def read_secret(path: Path) -> Secret[str]:
    """The line in a private file; which are, and errors, as in ``read_private``."""
    return Secret(read_private(path))


def read_private(path: Path) -> str:
    """The text of a private file: one that only this user can read, or one of root's that also its group can read.

    It may be behind a link of this user's or root's. Kubernetes mounts a Secret as such files and links. PostgreSQL has
    such a rule for its keys. Raises ``KeysError``.
    """
    try:
        if sys.platform == "win32" and path.is_symlink():
            raise KeysError(f"{path} must be a file of yours, and is a link")
        flags = _FLAGS
        if sys.platform != "win32" and path.lstat().st_uid not in (0, os.getuid()):
            flags |= _NO_FOLLOW
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status):
            raise KeysError(
                f"{path} must be a file of yours with mode 0600, or of root's with mode 0440; a secret in it may be "
                "known by now"
            )
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    if len(content) > SECRET_FILE_BYTES_MAX:
        raise KeysError(f"{path} is larger than {SECRET_FILE_BYTES_MAX} bytes")
    return content.decode("ascii", "replace").strip()


def _is_private(status: os.stat_result) -> bool:
    if sys.platform == "win32":  # it has no mode bits: a file is as private as its folder, that of the user's profile
        return True
    if status.st_uid == 0:  # also for root itself, as in a container that runs as root
        return not status.st_mode & 0o037
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def config_folder() -> Path:
    """This user's folder for keys and the addresses of hubs; it need not exist yet."""
    given = os.environ.get("XDG_CONFIG_HOME")
    return (Path(given) if given else Path.home() / ".config") / "envhub"
