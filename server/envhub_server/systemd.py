"""The hub as a service of systemd: what it tells systemd while it runs, and the unit that starts it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence

from envhub_server.log import log
from envhub_server.loop import Loop

BOOTED = "/run/systemd/system"  # exists where systemd is the init, see sd_booted(3)
MARK = "# Written by `envhub service install`. `envhub service uninstall` removes it.\n"
WATCHDOG_S = 30
STOP_SPARE_S = 15  # for processes to be ended after all drain times


class ServiceManager:
    """Tells the program that started the hub, as sd_notify(3) says; without one, it does nothing."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take its variables away, so that no worker speaks for the hub."""
        path = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", "0"), environ.pop("WATCHDOG_PID", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if path else None
        is_watched = watchdog_us.isdecimal() and pid in ("", str(os.getpid()))
        self._period_s = int(watchdog_us) / 2e6 if is_watched else 0.0
        self._status: Callable[[], str] = str

    def tell(self, *lines: str) -> None:
        """Send ``lines``, such as READY=1, with the status of now."""
        if self._socket is None:
            return
        text = "\n".join((*lines, f"STATUS={' '.join(self._status().split())}"))
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as error:  # the next word of the watchdog may reach it
            # Event: The service manager does not take what the hub tells it, and may restart the hub.
            log.warning(
                "service_manager_unreachable", once_per=("why",), message=text.splitlines()[0], why=error.strerror
            )

    def ready(self, loop: Loop, status: Callable[[], str]) -> None:
        """Say that the hub serves, and from now on that its loop goes round."""
        self._loop, self._status = loop, status
        self.tell("READY=1")
        self._watch()

    def _watch(self) -> None:
        if self._period_s:
            self.tell("WATCHDOG=1")
            self._loop.schedule.set(self._watch, self._loop.clock.now_s() + self._period_s)

    def reloading(self) -> None:
        """Say that the configuration is read again; ``tell("READY=1")`` ends it."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def unit_of(command: Sequence[str], folder: str, drain_s: float, user: str | None) -> str:
    """A unit that runs a command in a folder: of the system, as this user, or with None of a user's own manager."""
    of_system, target = _OF_SYSTEM.format(user=user) if user else "", "multi-user" if user else "default"
    return MARK + _UNIT.format(
        start=" ".join(map(quoted, command)),
        folder=folder.replace("%", "%%"),
        stop_s=round(drain_s) + STOP_SPARE_S,
        watchdog_s=WATCHDOG_S,
        of_system=of_system,
        target=target,
    )


def quoted(word: str) -> str:
    """A word as systemd's command lines have it; see systemd.service(5)."""
    text = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", text, re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_UNIT = """\
[Unit]
Description=EnvHub, a hub of Gymnasium environments
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
ExecStart={start}
ExecReload=kill -HUP $MAINPID
WorkingDirectory={folder}
SyslogIdentifier=%N
WatchdogSec={watchdog_s}
Restart=on-failure
RestartSec=2
# With these it refuses its configuration or its keys.
RestartPreventExitStatus=2 3
# The hub ends its workers in order; what is left after that is killed.
KillMode=mixed
TimeoutStopSec={stop_s}
# A worker that the kernel kills for its memory is replaced by the hub.
OOMPolicy=continue
TasksMax=infinity
NoNewPrivileges=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
{of_system}
[Install]
WantedBy={target}.target
"""
# Without those that take what envs need: /tmp (sockets, screens), devices (GPUs), homes, namespaces, compiled code.
_OF_SYSTEM = """\
User={user}
RuntimeDirectory=%N
RuntimeDirectoryMode=0700
LogsDirectory=%N
LogsDirectoryMode=0700
ProtectSystem=full
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
"""
