"""The folder of a hub's keys: its own, and the public ones of its clients.

::

    DIR/server.key          the hub's secret key; of mode 0600
    DIR/clients/NAME.toml   a client's public keys, at most two, its right, and its quotas

Two keys per client let it change its key without a stop: add the new one, use it, remove the old one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from envhub.errors import KeysError
from envhub.transport import sockets
from envhub.transport.keys import key_of, read_secret, text_of, write_secret
from envhub_server.network.rights import RIGHTS, Holder, Quotas

KEYS_PER_CLIENT_MAX = 2
CLIENTS_MAX = 1024
CLIENT_FILE_BYTES_MAX = 1 << 14
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = structlog.get_logger("envhub.hub")


class KeyFolder:
    """A folder of keys, and who is admitted by it.

    Attributes:
        path: of the folder.
        holders: by public key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holders: Mapping[bytes, Holder] = {}
        self._read: object = None  # names, sizes and times of the files that were read last

    # --- the hub's own key --------------------------------------------------------------------------------------------

    def secret(self) -> bytes:
        """The hub's secret key.

        Raises:
            KeysError: there is none, or others can read it.
        """
        return key_of(read_secret(self.path / "server.key"))

    def make_secret(self) -> bytes:
        """The hub's secret key, made if there is none.

        Raises:
            KeysError: it cannot be made, or others can read it.
        """
        path = self.path / "server.key"
        if not path.exists():
            write_secret(path, text_of(sockets.new_key_pair()[1]))
        return self.secret()

    # --- clients ------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read who is admitted.

        Raises:
            KeysError: a file cannot be used; nothing has changed.
        """
        state = self._state()
        holders: dict[bytes, Holder] = {}
        for path in self._files():
            holder, keys = _read_client(path)
            for key in keys:
                if key in holders:
                    raise KeysError(f"{path}: {holders[key].name} has the same key")
                holders[key] = holder
        self.holders, self._read = holders, state

    def refresh(self) -> bool:
        """Read again who is admitted, if a file has changed; an unusable one is logged, and the old list stays."""
        try:
            if self._state() == self._read:
                return False
            self.load()
        except (KeysError, OSError) as error:
            log.error("keys_unreadable", why=str(error), note="the keys read before stay admitted")
            try:
                self._read = self._state()
            except OSError:
                self._read = None
            return False
        log.info("keys_read", clients=len({holder.name for holder in self.holders.values()}))
        return True

    def _files(self) -> list[Path]:
        found = sorted(self._clients.glob("*.toml")) if self._clients.is_dir() else []
        if len(found) > CLIENTS_MAX:
            raise KeysError(f"{self._clients} has {len(found)} files of clients; at most {CLIENTS_MAX} are read")
        return found

    def _state(self) -> object:
        files = [(path.name, path.stat()) for path in self._files()]
        return [(name, found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode) for name, found in files]

    @property
    def _clients(self) -> Path:
        return self.path / "clients"

    def names(self) -> list[str]:
        """The clients that have a file."""
        return [path.stem for path in self._files()]

    def holder(self, name: str) -> tuple[Holder, list[bytes]]:
        """A client, and its public keys.

        Raises:
            KeysError: there is no such client, or its file cannot be used.
        """
        return _read_client(self._file(name))

    def add(self, name: str, key: bytes, right: str | None = None) -> None:
        """Admit a public key for a client, with this right; a client that exists gets a second key.

        Without a right, a client that exists keeps its own, and a new one may use the hub.

        Raises:
            KeysError: it has two keys already, or its file cannot be written.
        """
        before, keys = self.holder(name) if self._file(name).exists() else (Holder(name), [])
        if len(keys) >= KEYS_PER_CLIENT_MAX:
            raise KeysError(f"{name} has {len(keys)} keys; remove one first (`envhub keys remove {name} --key KEY`)")
        self._write(name, [*keys, key], right or before.right)

    def remove(self, name: str, key: bytes | None = None) -> None:
        """Admit a client no more, or only this key of it.

        Raises:
            KeysError: there is no such client, or no such key of it.
        """
        holder, keys = self.holder(name)
        if key is not None and key not in keys:
            raise KeysError(f"{name} has no such key")
        rest = [] if key is None else [each for each in keys if each != key]
        if rest:
            self._write(name, rest, holder.right)
        else:
            self._file(name).unlink()

    def _file(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise KeysError(f"{name!r} is no name: letters, digits, dots, dashes and underscores, at most 64")
        return self._clients / f"{name}.toml"

    def _write(self, name: str, keys: list[bytes], right: str) -> None:
        if right not in RIGHTS:
            raise KeysError(f"{right!r} is no right; there are {', '.join(RIGHTS)}")
        path = self._file(name)
        listed = ", ".join(f'"{text_of(key)}"' for key in keys)
        text = f'keys = [{listed}]\nmay = "{right}"'
        if path.exists():  # keep the quotas, as they are written
            _, mark, quotas = path.read_text().partition("[quotas]")
            text += f"\n\n{mark}{quotas.rstrip()}" if mark else ""
        write_secret(path, text, replace=True)


class _ClientFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[str]
    may: str = "use"
    quotas: Quotas = msgspec.field(default_factory=Quotas)


def _read_client(path: Path) -> tuple[Holder, list[bytes]]:
    try:
        found = msgspec.convert(tomllib.loads(read_secret(path)), _ClientFile)
        keys = [key_of(text) for text in found.keys]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, KeysError) as error:
        raise KeysError(f"{path}: {error}") from error
    if not 0 < len(keys) <= KEYS_PER_CLIENT_MAX or found.may not in RIGHTS:
        raise KeysError(f"{path}: 1 or {KEYS_PER_CLIENT_MAX} keys are wanted, and may = one of {', '.join(RIGHTS)}")
    if min(msgspec.structs.asdict(found)["quotas"].__dict__.values()) < 0:
        raise KeysError(f"{path}: a quota is negative")
    return Holder(path.stem, found.may, found.quotas), keys
