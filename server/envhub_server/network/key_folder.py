"""The folder of a hub's keys: its own, and the public ones of its clients.

::

    DIR/server.key          the hub's secret key; private, as of ``envhub.transport.address.read_private``
    DIR/clients/NAME.toml   a client's public keys, at most two, its right, and its quotas

Two keys per client let it change its key without a stop: add the new one, use it, remove the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from envhub.errors import KeysError
from envhub.files import weakness_of
from envhub.options import OptionError, options_from
from envhub.secret import Secret
from envhub.transport import address, sockets
from envhub_server.config import read_toml
from envhub_server.log import log
from envhub_server.network.connections import RIGHTS, Holder, Quotas, Right

KEYS_PER_CLIENT_MAX = 2
CLIENTS_MAX = 1024
CLIENT_REMOVED = "removed"  # the change of a client whose file is gone


class KeyFolder:
    """A folder of keys, and who is admitted by it."""

    def __init__(self, path: Path) -> None:
        self.path = path  # of the folder
        self.holders: Mapping[bytes, Holder] = {}  # by public key
        # What is wrong with the names of files that were no client's when the folder was last looked at.
        self.passed_over: list[str] = []
        self._read: dict[str, _File] = {}  # by name, as it was when it was read last
        self._problems: list[str] = []  # that were logged, and are there still

    def secret(self) -> Secret[bytes]:
        return address.read_key(self.path / "server.key")

    def make_secret(self) -> Secret[bytes]:
        path = self.path / "server.key"
        if self.path.exists() and not self.path.is_dir():
            raise KeysError(f"{self.path} is no folder; name the folder that `envhub keys add --keys` made")
        if not path.exists():
            with self._locked():
                self._check_owners()  # before the address of a hub is given out that would refuse to start
                if not path.exists():  # another process may have made it meanwhile
                    address.write_key(path, sockets.new_key_pair()[1])
        return self.secret()

    def load(self) -> None:
        if not self.path.exists():
            raise KeysError(f"there is no folder {self.path}; `envhub keys add NAME --keys {self.path}` makes it")
        self._check_owners()
        if problems := self._load():
            raise KeysError(problems[0])
        self._log_problems([])

    def _check_owners(self) -> None:
        """Check that no other user can put a file into the folder, or another folder into its place."""
        for folder in filter(Path.exists, (self.path, self._clients)):
            status = folder.stat()
            if _is_of_mounted_secret(folder, status):
                continue
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                raise KeysError(
                    f"{folder} must be a folder of yours that no other user may write to (chmod 700 {folder})"
                )
            if (weakness := weakness_of(str(folder))) is not None:
                raise KeysError(f"another user could replace {folder}, since {weakness}: keep the keys elsewhere")

    def refresh(self) -> list[tuple[str, str]]:
        """Read changed files; return each client, and how what it may changed. Old keys of an unusable file stay."""
        before = self._read
        self._log_problems(self._load())
        changed = [name for name in sorted({*before, *self._read}) if before.get(name) != self._read.get(name)]
        return [(name, _difference(before.get(name), self._read.get(name))) for name in changed]

    def _log_problems(self, problems: Sequence[str]) -> None:
        before, self._problems = self._problems, [*problems, *self.passed_over]
        for why in problems:
            if why not in before:
                # Event: A file of keys cannot be used: the keys read before stay, or it is ignored.
                log.error("keys_unreadable", why=why, note="the keys read before stay admitted")
        for why in self.passed_over:
            if why not in before:
                log.warning("keys_unreadable", why=why, note="the file is passed over")

    def _load(self) -> list[str]:
        """Read the files that have changed; return what is wrong."""
        try:
            states = self._states()
        except OSError as error:
            return [str(error)]
        problems = []
        if len(states) > CLIENTS_MAX:  # which may not keep the key of a client that was removed
            problems.append(f"{self._clients} has {len(states)} files of clients; at most {CLIENTS_MAX} are read")
            states = {name: states[name] for name in states if name in self._read}
        read: dict[str, _File] = {}
        holders: dict[bytes, Holder] = {}
        for name, state in states.items():
            file = self._read.get(name)
            if file is None or file.state != state:
                try:
                    file = _File(state, *_read_client(self._clients / f"{name}.toml"))
                except KeysError as error:
                    file = _File(state, *((file.holder, file.keys) if file else (Holder(name), [])), str(error))
            read[name] = file
            problems += [file.problem] if file.problem else []
            for key in file.keys:
                holder = holders.setdefault(key, file.holder)
                if holder.name != name:
                    problems.append(f"{name} and {holder.name} have the same key, which is {holder.name}'s")
        self.holders, self._read = holders, read
        return problems

    def _states(self) -> dict[str, object]:
        states, passed_over = {}, []
        with os.scandir(self._clients) if self._clients.exists() else contextlib.nullcontext(()) as entries:
            for entry in entries:
                name = entry.name.removesuffix(".toml")
                if name == entry.name:
                    continue
                if why := address.why_no_name(name):
                    passed_over.append(f"{str(self._clients / entry.name)!r}: {why}")
                    continue
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    at = entry.stat(follow_symlinks=False)
                    if entry.is_symlink():  # Kubernetes changes the file behind it, and not the link
                        with contextlib.suppress(OSError):
                            at = entry.stat()
                    states[name] = (at.st_ctime_ns, at.st_size, at.st_ino, at.st_mode, at.st_uid)
        self.passed_over = sorted(passed_over)
        return dict(sorted(states.items()))

    @property
    def _clients(self) -> Path:
        return self.path / "clients"

    def names(self) -> list[str]:
        return [*self._states()]

    def holder(self, name: str) -> tuple[Holder, list[bytes]]:
        return _read_client(self._file(name))

    def add(self, name: str, key: bytes, right: str | None = None) -> None:
        """Admit a key; without a right a client keeps its own, and a new one may use. Raises ``KeysError``."""
        with self._locked():
            self._check_owners()
            states = self._states()
            if len(states) > CLIENTS_MAX or (name not in states and len(states) == CLIENTS_MAX):
                raise KeysError(f"{self._clients} has files of {len(states)} clients, the most that are read")
            self._load()
            if key in self.holders:
                raise KeysError(f"{self.holders[key].name} has this key already")
            before, keys = self.holder(name) if os.path.lexists(self._file(name)) else (Holder(name), [])
            if len(keys) >= KEYS_PER_CLIENT_MAX:
                text = f"remove one first (`envhub keys remove {name} --key KEY`)"
                raise KeysError(f"{name} has {len(keys)} keys; {text}")
            self._write(name, [*keys, key], right or before.right, before.quotas or Quotas())

    def remove(self, name: str, key: bytes | None = None) -> None:
        if not os.path.lexists(self._file(name)):
            raise KeysError(
                f"there is no client {name!r} in {self._clients}; `envhub keys list --keys {self.path}` lists them"
            )
        with self._locked():
            if key is not None:
                holder, keys = self.holder(name)
                if key not in keys:
                    raise KeysError(f"{name} has no such key")
                if rest := [each for each in keys if each != key]:
                    self._write(name, rest, holder.right, holder.quotas or Quotas())
                    return
            self._file(name).unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise KeysError(f"{self.path} cannot be changed: {error}") from error

    def _file(self, name: str) -> Path:
        if why := address.why_no_name(name):
            raise KeysError(why)
        return self._clients / f"{name}.toml"

    def _write(self, name: str, keys: list[bytes], right: str, quotas: Quotas) -> None:
        if right not in RIGHTS:
            raise KeysError(f"{address.quoted(right)} is no right; there are {', '.join(RIGHTS)}")
        texts = [f'"{address.text_of(key)}"' for key in keys]
        lines = [f"keys = [{', '.join(texts)}]", f'may = "{right}"']
        if changed := {name: most for name, most in structs.asdict(quotas).items() if most != getattr(Quotas(), name)}:
            lines += ["", "[quotas]", *(f"{name} = {most}" for name, most in changed.items())]
        address.write_secret(self._file(name), "\n".join(lines), replace=True)


@dataclass(frozen=True)
class _File:
    state: object
    holder: Holder  # as of the last time that it could be read
    keys: list[bytes]
    problem: str = ""  # why it cannot be read, if so


@dataclass(frozen=True)
class _ClientFile:
    keys: tuple[str, ...] = ()
    may: Right = "use"
    quotas: Quotas = field(default_factory=Quotas)


def _is_of_mounted_secret(folder: Path, status: os.stat_result) -> bool:
    """True for a Secret that Kubernetes mounts: root's, read-only, and sticky, so that its files stay those of root."""
    mode = stat.S_IMODE(status.st_mode) & ~stat.S_ISGID
    return status.st_uid == 0 and mode == 0o1777 and bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def _difference(old: _File | None, new: _File | None) -> str:
    if new is None:
        return CLIENT_REMOVED
    if new.problem:
        return "cannot be read; as before"
    if old is None:
        return f"may {new.holder.right}; keys added: {len(new.keys)}"
    added, removed = [*{*new.keys} - {*old.keys}], [*{*old.keys} - {*new.keys}]
    changes = [f"may {new.holder.right}, not {old.holder.right}"] if new.holder.right != old.holder.right else []
    changes += [f"keys added: {len(added)}"] if added else []
    changes += [f"keys removed: {len(removed)}"] if removed else []
    changes += ["other quotas"] if new.holder.quotas != old.holder.quotas else []
    return "; ".join(changes) or "as before"


def _read_client(path: Path) -> tuple[Holder, list[bytes]]:
    text = address.read_private(path)
    try:
        table = _ClientFile(**options_from(read_toml(path, text), _ClientFile, f"{path}: "))
        keys = [address.key_of(each) for each in table.keys]
    except OptionError as error:
        raise KeysError(str(error)) from error
    except ValueError as error:  # of a key that is none
        raise KeysError(f"{path}: {error}") from error
    if not 0 < len(keys) <= KEYS_PER_CLIENT_MAX:
        raise KeysError(f"{path}: keys is a list of 1 or {KEYS_PER_CLIENT_MAX} keys")
    return Holder(path.stem, table.may, table.quotas), keys
