"""The sessions of a vector env on its only hub, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envhub import errors
from envhub.protocol.messages import Make
from envhub.secret import Secret
from envhub_client.connection.connection import CONNECT_TIMEOUT_S
from envhub_client.deadline import Deadline
from envhub_client.federation.part import HubPart
from envhub_client.federation.rebuild import Rebuild
from envhub_client.session.description import ValueCodec
from envhub_client.session.maker import SessionMaker
from envhub_client.session.options import SessionOptions
from envhub_client.session.session import SeedsGiven


class OnlyHub:
    """An ``Opener`` of sessions on the hub at one address, or on the private hub."""

    is_only_hub = True

    def __init__(self, address: str | Secret[str] | None, make: Make, options: SessionOptions) -> None:
        """``make`` is the request for all rows; without an address they are on the private hub."""
        self.options, self.values, self.seeds = options, ValueCodec(allow_pickle=address is None), SeedsGiven()
        self._address, self._make = address, make
        self._makers: list[SessionMaker] = []  # of sessions that may be there; the last one is in use
        self.closed = False

    def open(self, num_envs: int) -> list[HubPart]:
        maker = self._new_maker()
        self._makers.append(maker)  # before there is a session: an interrupt may come as soon as there is
        return [self._part(maker, range(num_envs))]

    def _new_maker(self) -> SessionMaker:
        maker = SessionMaker(self._address, self._make, self.options)
        maker.keeps_last = True
        return maker

    def _part(
        self,
        maker: SessionMaker,
        rows: range,
        timeout: float = CONNECT_TIMEOUT_S,
        num_workers: int | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> HubPart:
        lane = maker.make(timeout, num_workers, seeds)
        return HubPart(maker.connection.hub or errors.hub_at(maker.connection.address), rows, maker, lane)

    def open_again(
        self,
        lost: HubPart,
        gone: Sequence[HubPart],
        rebuild: Rebuild,
        num_workers: int | None,
        check: Callable[[HubPart], None],
        deadline: Deadline,
    ) -> Sequence[HubPart]:
        if isinstance(rebuild.loss, errors.RemoteProtocolError):
            for part in gone:
                part.maker.end_on_hub()  # it may have no room for both
        maker = self._new_maker()
        maker.is_wanted = lambda: not rebuild.stopped
        try:
            timeout = min(CONNECT_TIMEOUT_S, max(1.0, deadline.left_s()))
            part = self._part(maker, lost.rows, timeout, num_workers, self.seeds.first_seeds(lost.rows))
            check(part)
            if rebuild.stopped:
                raise rebuild.loss
            self._makers.append(maker)
        except BaseException:
            maker.end()
            raise
        return [part]

    def end_later(self, gone: Sequence[HubPart], is_wanted: Callable[[], bool]) -> None:
        for part in gone if is_wanted() else ():
            part.maker.end()
            self._makers.remove(part.maker)

    def end_all(self, terminate: bool, deadline: Deadline | None = None) -> None:
        self.closed = True
        for maker in self._makers[:-1]:
            maker.end()
        for maker in self._makers[-1:]:
            maker.end(terminate, deadline)
