"""The process before the tcp addresses of a hub that strangers may use: ``main`` is what it executes.

::

    client ══ tcp ══ proxy ══ Unix socket, which has no name ══ the hub's ROUTER

It passes on what clients send, up to a limit of frames and bytes that the hub has not read (``zmtp_framing``). From a
connection at its limit it reads no more: one whose message is whole waits until the hub has read it. It ends none by
itself, and knows no client. The hub sees in their common memory (``proxy_page``) which connections are at their limit,
and ends those of which it cannot read a message. Of each connection that ended in its handshake the hub is told by a
message, since it may hear of it too late to see whose it was.
"""

from __future__ import annotations

import contextlib
import math
import resource
import secrets
import select
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import msgpack

from envhub.transport.tcp import tcp_facts
from envhub_server.ipc.process_marks import die_with_hub, prctl
from envhub_server.network import proxy_page
from envhub_server.network.proxy_page import EndedHandshake
from envhub_server.network.zmtp_framing import BYTES, FRAMES, HANDSHAKE, ClientFrames, HubFrames

CHUNK_BYTES = 1 << 17  # that is read of a connection in one iteration
# Connections that the hub has not noticed. It holds new ones back while it has few descriptors left, and libzmq (4.3.5)
# ends it where it has none for a connection by ipc. So no more may come than it keeps in reserve before it does so.
UNNOTICED_MAX = 16
DESCRIPTORS_KEPT = 64  # besides those of connections
FULL_CHECK_S, CHECK_S = 0.005, 0.2  # from one look to the next at connections that wait
LOOK_S = 0.0001  # of the time between two looks, for each connection that waits
LINGER_S = 2.0  # for a client to read what the hub had sent before it ended the connection
HOST_CHARS_MAX = 43  # of an address in the name of a connection, which has at most 108 bytes
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3

_PR_SET_NAME = 15
REPORTS_MAX = 16  # of ended handshakes that the hub has not read; until it has, no new clients are let in
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT
_STATES = {FRAMES: proxy_page.FULL_FRAMES, BYTES: proxy_page.FULL_BYTES, HANDSHAKE: proxy_page.FULL_HANDSHAKE}

Handler = Callable[[int], None]


class Link:
    """One client's connection, and the one to the hub that stands for it."""

    def __init__(
        self, proxy: Proxy, client: socket.socket, hub: socket.socket, slot: int, number: int, host: str
    ) -> None:
        self._proxy, self.client, self.hub, self.slot, self._host = proxy, client, hub, slot, host
        self._words, self._number = proxy.words[slot * proxy_page.WORDS : (slot + 1) * proxy_page.WORDS], number
        self._frames = ClientFrames(proxy.frames_max, proxy.bytes_max, proxy.curve)
        self._answers = HubFrames(proxy.curve)
        self._to_hub = b""  # counted, and not sent yet
        self._held = b""  # not counted yet
        self._to_client = b""
        self._client_ended = self._hub_ended = self._answered = False
        self._spoke = self._was_told = False  # whether the client, and the hub, have said something to each other
        self.closed = False
        self._paused = False  # whether nothing is read of the client for now
        self._linger_s = 0.0  # until when it waits for its client, once the hub has ended it
        self._words[proxy_page.RECEIVED] = self._words[proxy_page.STATE] = self._words[proxy_page.UNREAD_BYTES] = 0
        self._words[proxy_page.RECEIVED_NS] = time.monotonic_ns()
        self._words[proxy_page.NUMBER] = number

    # --- from the client to the hub ---------------------------------------------------------------------------------

    def on_client(self, events: int) -> None:
        if events & _OUT:
            self._send_to_client(b"")
        if self.closed or not events & ~_OUT:
            return
        if self._paused:  # the connection has failed
            self.close()
            return
        try:
            count = self.client.recv_into(self._proxy.chunk)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._client_ended = True
            if not self._to_hub:
                self.close()
            else:
                self._watch()
            return
        self._spoke = True
        self._words[proxy_page.RECEIVED] += count
        self._words[proxy_page.RECEIVED_NS] = time.monotonic_ns()
        data = self._proxy.chunk[:count]
        self._pass(memoryview(self._held + data) if self._held else data)

    def _pass(self, data: memoryview) -> None:
        frames = self._frames
        self._count_read()
        count = frames.admit(data)
        self._held = bytes(data[count:])
        self._send_to_hub(data[:count])

    @property
    def noticed(self) -> bool:
        return self._words[proxy_page.OWNER] == self._number

    def _pass_held(self) -> None:
        if self._held and not self._to_hub and not self._frames.full:
            self._pass(memoryview(self._held))

    def _count_read(self) -> None:
        if self.noticed:
            self._frames.read(self._words[proxy_page.FRAMES_READ], self._words[proxy_page.BYTES_READ])

    def _send_to_hub(self, data: memoryview) -> None:
        sent = 0
        try:
            if data:
                sent = self.hub.send(data)
        except BlockingIOError:
            pass
        except OSError:  # the hub has ended it; what it had sent is still to be read
            self._held, data = b"", data[:0]
        self._to_hub = bytes(data[sent:])
        self._show()
        if self._to_hub or self._frames.full or self._paused:
            self._watch()

    def _show(self) -> None:
        frames = self._frames
        self._words[proxy_page.UNREAD_BYTES] = max(0, frames.unread_bytes - frames.left)
        state = 0
        if frames.partial or self._held:
            state = proxy_page.PARTIAL
            self._proxy.look_again(self, bool(frames.full))
        self._words[proxy_page.STATE] = state | _STATES.get(frames.full, 0)

    def look(self, now_s: float) -> None:
        if self._linger_s:
            if self._linger_s < now_s:
                self.close()
            else:
                self._proxy.look_again(self, soon=False)
            return
        if self._paused:
            with contextlib.suppress(OSError):
                received_ns = time.monotonic_ns() - int(tcp_facts(self.client)[0] * 1e9)
                self._words[proxy_page.RECEIVED_NS] = max(self._words[proxy_page.RECEIVED_NS], received_ns)
        self._count_read()
        self._pass_held()
        self._show()
        if self._paused:
            self._proxy.look_again(self, bool(self._frames.full))

    # --- from the hub to the client ---------------------------------------------------------------------------------

    def on_hub(self, events: int) -> None:
        if events & _OUT:
            self._send_to_hub(memoryview(self._to_hub))
            self._pass_held()
            if self._client_ended and not self._to_hub:
                self.close()
        if self.closed or not events & ~_OUT:
            return
        try:
            count = self.hub.recv_into(self._proxy.chunk)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._hub_ended = True
            self._end_after_sending()
            return
        data = self._proxy.chunk[:count]
        pongs = self._answers.scan(data)
        if pongs:
            self._frames.answered(pongs)
            self._show()
        elif self._answers.ready and not self._answered:
            self._answered = True
            self._frames.ready()
            self._pass_held()
            self._show()
            self._watch()
        self._send_to_client(data)

    def _send_to_client(self, data: memoryview | bytes) -> None:
        waited = bool(self._to_client)
        if waited:
            data = memoryview(self._to_client + bytes(data))
        sent = 0
        try:
            if data:
                sent = self.client.send(data)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._was_told = self._was_told or sent > 0
        self._to_client = bytes(data[sent:])
        if self._to_client or waited:
            self._watch()
        if self._hub_ended:
            self._end_after_sending()

    def _end_after_sending(self) -> None:
        if not self._to_client:
            self.close()
        elif not self._linger_s:
            self._linger_s = time.monotonic() + LINGER_S
            self._watch()

    def begin(self) -> None:
        self._proxy.handlers[self.client.fileno()] = self.on_client
        self._proxy.handlers[self.hub.fileno()] = self.on_hub
        self._watch()

    def _watch(self) -> None:
        """Wait for what can be handled now. A descriptor that waits for nothing would still report its end."""
        if self.closed:
            return
        self._paused = bool(self._to_hub or self._frames.full or self._client_ended or self._hub_ended)
        self._proxy.watch(self.client, _IN * (not self._paused) | _OUT * bool(self._to_client))
        self._proxy.watch(self.hub, _IN * (not self._to_client and not self._hub_ended) | _OUT * bool(self._to_hub))
        if self._paused:
            self._proxy.look_again(self, bool(self._frames.full))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._show()
            if self._proxy.curve and not self._answers.ready:
                self._report()
            self._proxy.forget(self)

    def _report(self) -> None:
        spoke = self._spoke
        if not spoke:  # the kernel may have thrown away what it had sent, when the connection was reset
            try:
                spoke = tcp_facts(self.client)[1] > 1
            except OSError:
                spoke = True
        answers = self._answers
        self._proxy.report(EndedHandshake(self._host, spoke, self._was_told, answers.welcomed, answers.denied))


class Proxy:
    """All connections of one hub. ``handlers``: of each descriptor that is waited for."""

    def __init__(self, name: str, curve: bool, frames_max: int, bytes_max: int, descriptors: Sequence[int]) -> None:
        """``descriptors``: a socket to the hub, which ends as it does; the hub's listener; the page; the addresses."""
        control, hub, page, *listeners = descriptors
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._reports: deque[EndedHandshake] = deque()
        self.words = proxy_page.words_of(page)
        self.curve, self.frames_max, self.bytes_max = curve, frames_max, bytes_max
        self.chunk = memoryview(bytearray(CHUNK_BYTES))
        self.handlers: dict[int, Handler] = {}
        # Links to look at again: whose message is not whole, or of which nothing is read for now, or that end.
        self._waiting: set[Link] = set()
        self._look_s = math.inf
        self._hub, self._name = f"/proc/self/fd/{hub}", name
        self._listeners = [socket.socket(fileno=listener) for listener in listeners]
        self._links: set[Link] = set()
        self._connecting: deque[tuple[Link, str]] = deque()
        self._unnoticed: deque[Link] = deque()
        self._free = deque(range(proxy_page.SLOTS))
        self._number = 0
        self._links_max = min(proxy_page.SLOTS, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_KEPT) // 2)
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}
        self._listening = self._stopping = False
        self._end_s = 0.0

    def run(self) -> None:
        self.handlers[self._control.fileno()] = self._on_control
        self._epoll.register(self._control, _IN)
        for listener in self._listeners:
            listener.setblocking(False)
            self.handlers[listener.fileno()] = partial(self._accept, listener)
        self._listen()
        while not self._stopping or (self._links and time.monotonic() < self._end_s):
            wait_s = None if self._look_s == math.inf else max(0.0, self._look_s - time.monotonic())
            for descriptor, events in self._epoll.poll(wait_s):
                handler = self.handlers.get(descriptor)
                if handler is None:  # an earlier one of this iteration has closed it
                    continue
                try:
                    handler(events)
                except Exception:  # a bug costs no other connection anything
                    traceback.print_exc()
                    if isinstance(link := getattr(handler, "__self__", None), Link):
                        link.close()
            if self._look_s < math.inf and (now_s := time.monotonic()) >= self._look_s:
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        waiting, self._waiting, self._look_s = self._waiting, set(), math.inf
        for link in waiting:
            if not link.closed:
                link.look(now_s)
        for _ in range(len(self._connecting)):
            self._connect(*self._connecting.popleft())
        self._send_reports()
        self._listen()
        self._look_s = max(self._look_s, now_s + LOOK_S * len(self._waiting))

    def look_again(self, link: Link, soon: bool) -> None:
        self._waiting.add(link)
        self._plan(FULL_CHECK_S if soon else CHECK_S)

    def _plan(self, after_s: float) -> None:
        self._look_s = min(self._look_s, time.monotonic() + after_s)

    def _on_control(self, events: int) -> None:
        """End, because the hub has closed its addresses: pass on what it has sent, and let no new clients in."""
        self._epoll.unregister(self._control)
        self._stopping, self._end_s = True, time.monotonic() + LINGER_S
        self._plan(LINGER_S)
        self._listen()

    def report(self, ended: EndedHandshake) -> None:
        self._reports.append(ended)
        self._send_reports()

    def _send_reports(self) -> None:
        try:
            while self._reports:
                self._control.send(msgpack.encode(self._reports[0]))
                self._reports.popleft()
        except BlockingIOError:
            self._plan(FULL_CHECK_S)
        except OSError:  # the hub has ended
            self._reports.clear()

    def _listen(self) -> None:
        while self._unnoticed and (self._unnoticed[0].closed or self._unnoticed[0].noticed):
            self._unnoticed.popleft()
        crowded = len(self._unnoticed) >= UNNOTICED_MAX or len(self._reports) >= REPORTS_MAX
        if crowded:
            self._plan(FULL_CHECK_S)
        wanted = not self._stopping and not crowded and len(self._links) < self._links_max
        if wanted != self._listening:
            self._listening = wanted
            for listener in self._listeners:
                self.watch(listener, _IN * wanted)

    def _accept(self, listener: socket.socket, events: int) -> None:
        if not self._listening:
            return
        try:
            client, address = listener.accept()
        except OSError:  # there is none, or it has ended already
            return
        host, hub = str(address[0]), None
        try:
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
            hub = socket.socket(socket.AF_UNIX)
            hub.setblocking(False)
        except OSError:
            client.close()
            if hub is not None:
                hub.close()
            return
        self._number += 1
        slot = self._free.popleft()  # the one that was freed first
        link = Link(self, client, hub, slot, self._number, host)
        self._links.add(link)
        self._unnoticed.append(link)
        self._listen()
        # Every user may bind an abstract name. So a part of it is secret until it is bound.
        secret = secrets.token_hex(6)
        self._connect(link, f"\0{self._name}/{slot}/{self._number}/{secret}/{host[:HOST_CHARS_MAX]}")

    def _connect(self, link: Link, name: str) -> None:
        """Connect to the hub by a name that tells it whose connection this is; later, if too many wait there."""
        if link.closed:
            return
        try:
            if not link.hub.getsockname():
                link.hub.bind(name)
            link.hub.connect(self._hub)
        except BlockingIOError:
            self._connecting.append((link, name))
            self._plan(FULL_CHECK_S)
        except OSError:  # the hub has ended
            link.close()
        else:
            link.begin()

    def forget(self, link: Link) -> None:
        for connection in (link.client, link.hub):
            self.watch(connection, 0)
            self.handlers.pop(connection.fileno(), None)
            connection.close()
        self._waiting.discard(link)
        self._links.discard(link)
        self._free.append(link.slot)
        self._listen()

    def watch(self, connection: socket.socket, events: int) -> None:
        descriptor = connection.fileno()
        before = self._watched.pop(descriptor, 0)
        if events:
            self._watched[descriptor] = events
        if events == before:
            return
        if not before:
            self._epoll.register(descriptor, events)
        elif events:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.unregister(descriptor)


def main(arguments: Sequence[str]) -> None:
    """Run the proxy: ``HUB_PID NAME CURVE(0|1) FRAMES_MAX BYTES_MAX CONTROL_FD HUB_FD PAGE_FD LISTENER_FD ...``."""
    parent, name, *numbers = arguments
    die_with_hub(int(parent))
    prctl(_PR_SET_NAME, b"envhub-proxy")
    curve, frames_max, bytes_max, *descriptors = map(int, numbers)
    Proxy(name, bool(curve), frames_max, bytes_max, descriptors).run()
