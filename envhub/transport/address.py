"""Addresses, the keys in them, and the files that keep keys.

A key of CURVE has 32 bytes. As text it is base64 with ``-`` and ``_``, without padding: 43 characters.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envhub.errors import AddressError, KeysError, hidden
from envhub.files import open_regular_file, weakness_of
from envhub.frozen import Frozen
from envhub.secret import SHOWN, Secret

KEY_BYTES = 32
KEY_TEXT_CHARS = 43
SECRET_FILE_BYTES_MAX = 1 << 14
NOT_SHOWN = "what was given"
_BINARY = getattr(os, "O_BINARY", 0)  # of Windows: without it a line would end otherwise than it is written
_SHOWN_CHARS_MAX = 200


class HubKeys(Frozen):
    """The keys that a client connects with: the hub's public key, and its own secret key."""

    server: bytes
    secret: Secret[bytes]


def text_of(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


def key_of(text: str, keys: int = 1) -> bytes:
    """The key, or ``keys`` joined ones, in a text of ``text_of``, which a ``KeysError`` does not repeat."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raw = b""
    if len(raw) != keys * KEY_BYTES:
        raise KeysError(f"this is no key: {keys * KEY_BYTES} bytes of base64 are wanted, see that all was copied")
    return raw


def token_of(keys: HubKeys) -> Secret[str]:
    return Secret(text_of(keys.server + keys.secret.reveal_secret()))


def keys_of(token: str) -> HubKeys:
    try:
        both = key_of(token, 2)
    except KeysError as error:
        raise AddressError(f"the token of this envhub:// address: {error}") from error
    return HubKeys(both[:KEY_BYTES], Secret(both[KEY_BYTES:]))


def quoted(text: str) -> str:
    """Quote what a user has given, for an error; a text that may contain a secret is not repeated."""
    is_plain = "@" not in text and hidden(text) == text and len(text) <= _SHOWN_CHARS_MAX
    return repr(text) if is_plain else NOT_SHOWN


def write_secret(path: Path, text: Secret[str] | str, replace: bool = False) -> None:
    """Write a line into a new file that only this user can read; with ``replace`` the file may exist."""
    import secrets

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        try:
            with open(descriptor, "wb") as file:  # Windows neither renames nor removes a file that is open
                line = text.reveal_secret() if isinstance(text, Secret) else text
                file.write(line.encode() + b"\n")
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error}") from error


def write_key(path: Path, key: Secret[bytes], replace: bool = False) -> None:
    write_secret(path, Secret(text_of(key.reveal_secret())), replace)


def read_key(path: Path) -> Secret[bytes]:
    """The secret key in a file that only this user can read; raises ``KeysError``."""
    try:
        return Secret(key_of(read_private(path)))
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from error


def read_private(path: Path) -> str:
    """The text of a file that only this user can read, or one of root's that also its group can; raises ``KeysError``.

    It may be behind a link of this user's or root's: Kubernetes mounts a Secret as such files and links.
    """
    try:
        if sys.platform == "win32" and path.is_symlink():
            raise KeysError(f"{path} must be a file of yours, and is a link")
        flags = 0
        if sys.platform != "win32" and path.lstat().st_uid not in (0, os.getuid()):
            flags = os.O_NOFOLLOW
        with open_regular_file(path, flags) as file:
            if not _is_private(os.fstat(file.fileno())):
                raise KeysError(
                    f"{path} must be a file of yours with mode 0600, or of root's with mode 0440; others may "
                    "know its secret"
                )
            content = file.read(SECRET_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
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
    given = os.environ.get("XDG_CONFIG_HOME")
    return (Path(given) if given else Path.home() / ".config") / "envhub"


ENVIRONMENT_VARIABLE = "ENVHUB_ADDRESS"
KEYS_LEFT_OUT = f"envhub://{SHOWN}@"  # the prefix of an address with keys
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # and surrogates
# A host name that a resolver may accept, in any script. DNS allows 253 characters.
HOST = re.compile(r"(?!-)(?=.{1,253}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a hub that is kept, of a client or of a fleet
FLEET_NAME_CHARS_MAX = 56  # a hub's name, with its number, has 64
PORT = re.compile(r"[0-9]{1,5}")
NO_ANNOUNCEMENTS = (
    "hubs do not announce themselves in a folder any more: name them by a list of their addresses, by dns://NAME:PORT "
    "or by ray://FLEET"
)
_FORM = "write tcp://HOST:PORT or ipc://PATH, or all of an envhub:// address"
IPC_PATH_BYTES_MAX = 107 if sys.platform == "linux" else 103  # sun_path, less its closing zero
TICKET_BYTES = 16  # of what a client shows at a hub's side socket


class Address(Frozen):
    """A parsed address: ``host`` and ``port`` of TCP, or the ``path`` of IPC."""

    text: str  # the address for ZeroMQ, without keys
    host: str = ""
    port: int = -1
    path: str = ""
    keys: HubKeys | None = None  # the client's keys; None if it presents none
    tunnelled: bool = False  # True if ssh forwards the path to another machine

    @property
    def is_ipc(self) -> bool:
        return bool(self.path)

    @property
    def crosses_network(self) -> bool:
        """True if each byte costs: of another machine, or encrypted."""
        return self.tunnelled or self.keys is not None or not (self.is_ipc or self.is_loopback)

    @property
    def is_ipv6(self) -> bool:
        """True for a literal IPv6 address, which a socket uses only with an option set."""
        return self.host.startswith("[")

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False  # a name may resolve to any machine


def side_path(path: str) -> str | None:
    """Path of a hub's side socket, from the path of its socket; None if it would be too long."""
    side = f"{path}.side"
    return side if len(os.fsencode(side)) <= IPC_PATH_BYTES_MAX else None


def guarded(hub: Any) -> Any:
    """The address as a ``Secret`` if it has keys; any other value as it is."""
    if isinstance(hub, str) and hub.strip().casefold().startswith("envhub:") and not drop_keys(hub):
        return Secret(hub)
    return hub


def drop_keys(text: str) -> str:
    """``HOST:PORT`` of an address whose keys ``written`` has hidden; empty for any other address."""
    text = text.strip()
    return text[len(KEYS_LEFT_OUT) :] if text.startswith(KEYS_LEFT_OUT) else ""


def written(hub: str | Secret[str]) -> str:
    """The address, or what else names a hub, for logs and messages: ``***`` replaces what may be a secret."""
    try:
        address = parse_hub(hub)
    except AddressError:  # of another kind, or none
        return SHOWN if isinstance(hub, Secret) else hidden(hub)
    return address.text if address.keys is None else address.text.replace("tcp://", KEYS_LEFT_OUT, 1)


def address_of_environment() -> Any:
    """The hub's address in ``ENVHUB_ADDRESS``, ``guarded``; None if it is not set."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text and _CONTROLS.search(text.strip()):
        raise AddressError(f"{ENVIRONMENT_VARIABLE}: {quoted(text)} has control characters, or is no UTF-8")
    return guarded(text) or None


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that does not connect to a hub: ``ENVHUB_ADDRESS`` without its keys."""
    if ENVIRONMENT_VARIABLE not in environ:
        return dict(environ)
    return {**environ, ENVIRONMENT_VARIABLE: written(guarded(environ[ENVIRONMENT_VARIABLE]))}


def parse(text: str | Secret[str]) -> Address:
    text = text.reveal_secret() if isinstance(text, Secret) else text
    if not isinstance(text, str):  # not shown, because it may contain a key
        raise AddressError(f"a value of type {type(text).__name__} is no address; {_FORM}")
    text = text.strip()
    if _CONTROLS.search(text):
        raise AddressError(f"{quoted(text)} is no address: it has control characters, or is no UTF-8")
    if target := drop_keys(text):
        raise AddressError(
            f"the keys of {KEYS_LEFT_OUT}{target} were left out where it was written down, and none are kept here "
            f"for {target}: run `envhub login` with the whole address"
        )
    if text.casefold().startswith("file:"):
        raise AddressError(NO_ANNOUNCEMENTS)
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > IPC_PATH_BYTES_MAX:
            raise AddressError(
                f"{hidden(text)}: a socket's path has at most {IPC_PATH_BYTES_MAX} bytes; choose a shorter one"
            )
        if rest.startswith("@"):
            raise AddressError(
                f"{hidden(text)}: any user could listen at an abstract name in the hub's place; choose a path"
            )
        return Address(text, path=rest)
    token, _, target = rest.rpartition("@") if scheme == "envhub" else ("", "", rest)
    host, _, port = target.rpartition(":")
    if scheme in ("tcp", "envhub") and "@" not in host and host and PORT.fullmatch(port) and int(port) < 65536:
        keys = keys_of(token) if scheme == "envhub" else None
        return Address(f"tcp://{target}", host=host, port=int(port), keys=keys)
    raise AddressError(f"{quoted(text)} is no address; {_FORM}")


def parse_hub(text: str | Secret[str]) -> Address:
    address = parse(text)
    if not address.is_ipc and not _can_be_a_host(address.host):
        raise AddressError(f"{quoted(address.host)} is no host; write its name or IP address, one of IPv6 in brackets")
    if address.port == 0:
        raise AddressError(f"no hub is at port 0 of {address.host}; `envhub serve` prints the port that it took")
    return address


def parse_bind(text: str) -> Address:
    address = parse(text)
    if address.keys is not None:
        shown_as = address.text.replace("tcp://", KEYS_LEFT_OUT, 1)
        raise AddressError(f"{shown_as} is an address for a client, with its key; a hub binds {address.text}")
    return address


def _can_be_a_host(host: str) -> bool:
    if not host.startswith("["):
        return HOST.fullmatch(host) is not None
    try:
        return host.endswith("]") and ipaddress.IPv6Address(host[1:-1]) is not None
    except ValueError:
        return False


def why_no_name(name: str, of: str = "", chars_max: int = 64) -> str:
    """The reason why this is no name; empty if it is one."""
    if NAME.fullmatch(name) and len(name) <= chars_max:
        return ""
    return f"{quoted(name)} is no name{of}: letters, digits, dots, dashes and underscores, at most {chars_max}"


def check_fleet_name(name: str) -> None:
    if why := why_no_name(name, " for a fleet", FLEET_NAME_CHARS_MAX):
        raise AddressError(why)


def default_address() -> str:
    return f"ipc://{runtime_folder() / 'hub.sock'}"


def runtime_folder() -> Path:
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "envhub"
    if sys.platform != "win32" and (usual := Path(f"/run/user/{os.getuid()}")).is_dir():
        return usual / "envhub"
    import tempfile

    if sys.platform == "win32":
        return Path(tempfile.gettempdir()) / "envhub"
    return Path(tempfile.gettempdir()) / f"envhub-{os.getuid()}"


def check_private(folder: Path) -> None:
    if sys.platform == "win32":  # where no hub runs
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AddressError(f"{folder} must be a folder of yours with mode 0700; remove it, or name another address")
    if (weakness := weakness_of(str(folder))) is not None:
        raise AddressError(
            f"another user could replace {folder}, since {weakness}: set XDG_RUNTIME_DIR to a folder that only you can "
            "replace, or name another address"
        )
