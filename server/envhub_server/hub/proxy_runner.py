"""The run of a hub's proxy: a process that accepts the connections of strangers."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from envhub.protocol.prelude import FRAMES_MAX
from envhub_server.loop import Loop
from envhub_server.network.access import Access
from envhub_server.network.proxy import ProxyHandle
from envhub_server.processes.supervisor import Supervisor


class ProxyRunner:
    """Starts the proxy, again if it ends, and hears its reports. It owns the process; ``access`` reads its page."""

    def __init__(self, access: Access, children: Supervisor, loop: Loop, unread_bytes_max: int) -> None:
        """Run nothing yet.

        Args:
            access: which is told of handshakes that have ended.
            children: which is told of the process.
            loop: which waits for the process.
            unread_bytes_max: that a client may have sent and the hub has not read.
        """
        self._access, self._children, self._loop = access, children, loop
        self._unread_bytes_max = unread_bytes_max

    def start(self, listeners: Sequence[socket.socket], hub: int) -> None:
        """Start the proxy for these addresses; ``hub`` is the descriptor of the hub's socket for it.

        Raises:
            OSError: there is no process, descriptor or memory left.
        """
        access = self._access
        proxy = ProxyHandle(self._children, hub, access.encrypted, FRAMES_MAX, self._unread_bytes_max)
        access.proxy = proxy
        proxy.start(listeners, self._loop.clock.now_s())
        self._wait_for(proxy)

    def _wait_for(self, proxy: ProxyHandle) -> None:
        self._loop.poller.register(proxy.pidfd, self)
        self._loop.poller.register(proxy.reporting, self)

    def on_ready(self, descriptor: int) -> None:
        """Read the reports of the proxy, or note its end."""
        proxy, loop = self._access.proxy, self._loop
        assert proxy is not None
        if descriptor == proxy.reporting:
            self._read_reports(proxy)
            return
        self._read_reports(proxy)
        loop.poller.unregister(descriptor)
        proxy.ended(loop.clock.now_s())
        loop.schedule.set(self._start_again, proxy.restart_s)

    def _read_reports(self, proxy: ProxyHandle) -> None:
        """Note the handshakes that have ended by the proxy."""
        reporting = proxy.reporting
        for ended in proxy.reports():
            self._access.handshake_ended(ended)
        if proxy.reporting < 0:
            self._loop.poller.unregister(reporting)

    def _start_again(self) -> None:
        proxy = self._access.proxy
        assert proxy is not None
        proxy.check(self._loop.clock.now_s())
        if proxy.pidfd >= 0:
            self._wait_for(proxy)
        self._loop.schedule.set(self._start_again, proxy.restart_s)

    def close(self) -> None:
        """End the process; the hub's ROUTER must be closed before."""
        if self._access.proxy is not None:
            self._access.proxy.close()
