"""Hubs by name: kept by ``envhub login`` in a file ``hubs/NAME`` of this user alone, in DNS, and of a fleet on Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from envhub.errors import AddressError, HubUnreachable, KeysError, only_linux, shortened
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import Address, HubKeys, quoted
from envhub_client.connection import ssh_tunnel
from envhub_client.connection.local_sockets import open_socket_file

Hubs = str | Secret[str] | Sequence[str | Secret[str]]
_DNS, _RAY = "dns://", "ray://"
LOOKUP_TIMEOUT_S = 60.0  # for a program to start and to connect to Ray
_SHOWN, _WHY_CHARS_MAX = 10, 500  # hubs and characters in one error


def resolve(hub: str | Secret[str]) -> Address:
    """The address of the one hub that this stands for, with the keys that this user keeps, if it has none."""
    if isinstance(hub, str) and addresses.NAME.fullmatch(hub):
        kept = _kept(hub)
        try:
            return _reached(kept)
        except AddressError as error:
            raise AddressError(f"{_folder() / hub}: {error}") from error
    if isinstance(hub, str) and (host_port := addresses.drop_keys(hub)):
        return _find_kept(host_port) or addresses.parse_hub(hub)
    return _reached(hub)


def _reached(address: str | Secret[str]) -> Address:
    if stands_for_several(address):
        if len(hubs := members(address)) > 1:
            names = ", ".join(hub.name for hub in hubs[:_SHOWN])
            raise AddressError(
                f"{address} stands for {len(hubs)} hubs ({names}), and one connection goes to one hub: name one of "
                f"them; `envhub fleet ls {address}` lists their addresses"
            )
        address = hubs[0].address
    if isinstance(address, str) and address.startswith("ssh://"):
        if sys.platform == "win32":
            raise AddressError(only_linux("an ssh:// address"))
        return replace(addresses.parse_hub(ssh_tunnel.forwarded(address)), tunnelled=True)
    hub = addresses.parse_hub(address)
    if hub.is_ipc and sys.platform == "win32":
        raise AddressError(only_linux(f"the address {hub.text}"))
    return hub


def _find_kept(host_port: str) -> Address | None:
    return next((hub for _, hub in _kept_with_keys() if hub.text == f"tcp://{host_port}"), None)


def _kept_with_keys() -> Iterator[tuple[str, Address]]:
    """The addresses with keys, by the names under which they are kept; that of ``ENVHUB_ADDRESS`` has no name."""
    for name in ["", *names()]:
        with contextlib.suppress(AddressError, KeysError):
            hub = addresses.parse_hub(_kept(name) if name else addresses.address_of_environment() or "")
            if hub.keys is not None:
                yield name, hub


class KeptKey(NamedTuple):
    """A kept key: under this name, or without a name in ``ENVHUB_ADDRESS``; both as texts, too."""

    name: str
    location: str
    remedy: str


def kept_key(target: Address) -> KeptKey | None:
    """The place where this address is kept with its keys, or, if it has none, with any."""
    for name, hub in _kept_with_keys():
        if hub.text == target.text and target.keys in (None, hub.keys):
            if not name:
                remedy = f"set {addresses.ENVIRONMENT_VARIABLE} to the address that you are given"
                return KeptKey("", f"in {addresses.ENVIRONMENT_VARIABLE}", remedy)
            remedy = f"run `envhub login {name}` with what you are given; `envhub logout {name}` removes what is kept"
            return KeptKey(name, f"kept as {name!r} in {_folder() / name}", remedy)
    return None


def kept_now(name: str | Secret[str]) -> Address | None:
    """The address that is kept under this name now; None where this is no name, or the hub is reached by ssh."""
    if not isinstance(name, str) or not addresses.NAME.fullmatch(name):
        return None
    kept = _kept(name)
    return None if isinstance(kept, str) and kept.startswith("ssh://") else addresses.parse_hub(kept)


def _kept(name: str) -> str | Secret[str]:
    path = _folder() / name
    if not path.exists():
        all_names = ", ".join(names()) or "none yet"
        raise AddressError(
            f"no hub is known as {quoted(name)} (known: {all_names}); `envhub login` keeps the address of one"
        )
    kept: str | Secret[str] = addresses.guarded(addresses.read_private(path))
    return kept


def names() -> list[str]:
    kept = [path.name for path in _folder().iterdir()] if _folder().is_dir() else []
    return sorted(name for name in kept if addresses.NAME.fullmatch(name))


def make_own_key(new: bool = False) -> str:
    """Make this user's own secret key, if there is none or with ``new``; returns the public one, as text."""
    path = _own_key()
    if new or not path.exists():
        addresses.write_key(path, sockets.new_key_pair()[1], replace=new)
    return addresses.text_of(sockets.public_key(addresses.read_key(path)))


def add_own_key(address: str | Secret[str]) -> str | Secret[str]:
    text = address.reveal_secret() if isinstance(address, Secret) else address
    head, _, host_port = text.rpartition("@")
    if len(head) == len("envhub://") + addresses.KEY_TEXT_CHARS:
        if not _own_key().exists():
            raise KeysError("this address is for a key of one's own, and there is none here: run `envhub keygen` first")
        keys = HubKeys(addresses.key_of(head[-addresses.KEY_TEXT_CHARS :]), addresses.read_key(_own_key()))
        address = _with(keys, host_port)
    if text.startswith("ssh://"):
        ssh_tunnel.parse(text)
    else:
        addresses.parse_hub(address)
    return address


def _with(keys: HubKeys | None, host_port: str) -> str | Secret[str]:
    if keys is None:
        return f"tcp://{host_port}"
    return Secret(f"envhub://{addresses.token_of(keys).reveal_secret()}@{host_port}")


def name_of(address: str | Secret[str]) -> str:
    if isinstance(address, str) and address.startswith("ssh://"):
        host = ssh_tunnel.parse(address)[0].rpartition("@")[2]
    else:
        host = addresses.parse(address).host
    if not addresses.NAME.fullmatch(host):
        raise AddressError("the address has no host that can be the hub's name; give it one: envhub login NAME")
    return host


def keeps_another(name: str, address: str | Secret[str]) -> bool:
    """True if the hub that is kept under this name has another address, or another key of its own, than this one."""
    if not (_folder() / name).exists() or (kept := _kept(name)) == address:
        return False
    try:
        old, new = addresses.parse(kept), addresses.parse(address)
    except AddressError:  # by ssh, whose place is the whole text
        return True
    same_key = old.keys is None or (new.keys is not None and new.keys.server == old.keys.server)
    return old.text != new.text or not same_key


def keep(name: str, address: str | Secret[str]) -> None:
    check_name(name)
    addresses.write_secret(_folder() / name, address, replace=True)


def forget(name: str) -> None:
    check_name(name)
    try:
        (_folder() / name).unlink()
    except FileNotFoundError as error:
        raise AddressError(f"no hub is kept as {quoted(name)}; `envhub ls` lists the names") from error
    except OSError as error:
        raise KeysError(f"{_folder() / name} cannot be removed: {error.strerror}") from error


def check_name(name: str) -> None:
    if why := addresses.why_no_name(name, " for a hub"):
        raise AddressError(why)


def _own_key() -> Path:
    return addresses.config_folder() / "client.key"


def _folder() -> Path:
    return addresses.config_folder() / "hubs"


def _after(scheme: str, hub: str | Secret[str]) -> str | None:
    text = hub.strip() if isinstance(hub, str) else ""
    return text[len(scheme) :] if text.casefold().startswith(scheme) else None


def dns_name(hub: str | Secret[str]) -> Address | None:
    if (host_port := _after(_DNS, hub)) is None:
        return None
    address = f"tcp://{host_port}"
    try:
        addresses.parse(address)
    except AddressError as error:
        raise AddressError(f"{quoted(str(hub))} names no hubs; write {_DNS}NAME:PORT") from error
    return addresses.parse_hub(address)


def dns_hubs(target: Address) -> list[str]:
    """``HOST:PORT`` of each hub that the name stands for now; HOST is the hub's own name, or its IP address."""
    try:
        answers = socket.getaddrinfo(target.host.strip("[]"), target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HubUnreachable(
            f"{_DNS}{target.host}:{target.port}: the name has no address ({error}); see that a hub behind it is ready"
        ) from error
    # A host with addresses of both families is one hub.
    family = min(each[0] for each in answers)
    return sorted({f"{_host(str(each[4][0]), family)}:{target.port}" for each in answers if each[0] == family})


def _host(ip: str, family: socket.AddressFamily) -> str:
    """The name of the host with this address, if it is of this host alone; else the address."""
    if family == socket.AF_INET6:  # for which ZeroMQ resolves no names
        return f"[{ip}]"
    with contextlib.suppress(OSError, UnicodeError):
        name = socket.getnameinfo((ip, 0), socket.NI_NAMEREQD)[0]
        if {each[4][0] for each in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)} == {ip}:
            return name
    return ip


def ray_hubs(fleet: str) -> dict[int, str | Secret[str]]:
    """The addresses of a fleet's hubs that serve now, by number; a program without Ray asks by another process."""
    addresses.check_fleet_name(fleet)
    if sys.platform != "linux":
        raise AddressError(only_linux(f"ray://{fleet}"))
    if importlib.util.find_spec("ray") is None:
        raise AddressError(
            f"ray://{fleet} needs Ray, which is not installed here: pip install 'envhub-rl[ray]', or name the hubs "
            "by their addresses, in a list"
        )
    ray = sys.modules.get("ray")  # where it is not imported, it takes a second, and the program is not connected
    access: Mapping[int, tuple[str, str]]
    if ray is not None and ray.is_initialized():
        from envhub.fleet import Fleet

        access = Fleet(fleet).access()
    else:
        access = _looked_up(fleet)
    if not access:
        raise HubUnreachable(f"no hub of the fleet {fleet!r} serves now; Fleet({fleet!r}).ls() says what they do")
    return {index: _nearest(*each) for index, each in sorted(access.items())}


def _looked_up(fleet: str) -> Mapping[int, tuple[str, str]]:
    program = [sys.executable, "-m", "envhub.fleet.fleet", fleet]
    try:
        ran = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOKUP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise HubUnreachable(f"Ray has not answered for {error.timeout:g} s about the fleet {fleet!r}") from None
    if ran.returncode:
        why = shortened(ran.stderr.strip().rpartition("\n")[2], _WHY_CHARS_MAX)
        raise HubUnreachable(f"the fleet {fleet!r} is not found by the cluster of RAY_ADDRESS or this machine: {why}")
    return {int(index): tuple(access) for index, access in json.loads(ran.stdout).items()}


def _nearest(tcp: str, ipc: str) -> str | Secret[str]:
    """The socket of a hub on this machine, if this user may open it, else its tcp address with the key."""
    try:
        open_socket_file(ipc.removeprefix("ipc://")).close()
    except OSError:
        return Secret(tcp)
    return ipc


class Member(NamedTuple):
    """A hub of a fleet."""

    name: str  # by which the fleet knows it, also when it comes back at another address
    address: str | Secret[str]  # empty for the private hub


def members(hub: str | Secret[str]) -> tuple[Member, ...]:
    if (target := dns_name(hub)) is not None:
        kept = _find_kept(target.text.removeprefix("tcp://"))
        keys = None if kept is None else kept.keys  # of all of them
        return tuple(Member(each, _with(keys, each)) for each in dns_hubs(target))
    if (fleet := _after(_RAY, hub)) is not None:
        return tuple(Member(f"{fleet}/{index}", address) for index, address in ray_hubs(fleet).items())
    address = addresses.guarded(hub)
    return (Member(addresses.written(address), address),)


def all_members(hubs: Hubs) -> tuple[Member, ...]:
    named = (hubs,) if isinstance(hubs, (str, Secret)) else hubs
    chosen = [member for hub in named for member in members(hub)]
    if not chosen:
        raise AddressError("hub=[] names no hub")
    if twice := [member.name for index, member in enumerate(chosen) if member in chosen[:index]]:
        raise AddressError(f"the hub {min(twice)!r} is named twice: each hub has its rows in one session")
    return tuple(chosen)


def stands_for_several(hubs: Hubs) -> bool:
    named = (hubs,) if isinstance(hubs, (str, Secret)) else hubs
    return len(named) > 1 or any(dns_name(hub) is not None or _after(_RAY, hub) is not None for hub in named)
