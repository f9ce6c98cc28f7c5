"""Connecting to several hubs at the same time; hubs that cannot share a vector env are refused, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest
from hubs import ServedHub, serve, signalled_in_a_wait, wait_until
from lying_hub import NUM_ENVS, LyingHub
from new_keys import keys_in

import envhub
from envhub.protocol.messages import Op


class SilentPlace:
    """A place at which connections are accepted by the kernel, and no hub answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def ended(self) -> bool:
        """True if there was a connection, which its client has ended."""
        with self._listener.accept()[0] as connection:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[list[SilentPlace]]:
    places = [SilentPlace() for _ in range(3)]
    yield places
    for place in places:
        place.close()


@dataclass(frozen=True)
class Left:
    """What the program has: its threads of the library, and the number of its files."""

    threads: frozenset[threading.Thread]
    files: int

    def is_within(self, before: Left) -> bool:
        """True if nothing was added to what the program had before."""
        return self.threads <= before.threads and self.files <= before.files


def left() -> Left:
    """What the program has now."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("envhub")]
    return Left(frozenset(threads), len(os.listdir("/proc/self/fd")))


@pytest.fixture
def before(hub: ServedHub) -> Iterator[Left]:
    """What a program has that is connected to a hub: its first connection opens files and starts a thread that stay."""
    with envhub.connect(hub.tcp):
        yield left()


def sessions(hub: ServedHub) -> set[str]:
    """The names of the sessions on this hub, on which other tests may have some."""
    with envhub.connect(hub.tcp) as client:
        return {each["session"] for each in client.sessions()}


def make(*addresses: str) -> envhub.HubVectorEnv:
    return envhub.make_vec("counter", len(addresses), hub=addresses, split=[1] * len(addresses))


def test_all_hubs_are_connected_to_before_one_has_answered(
    hub: ServedHub, silent: list[SilentPlace], before: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub_client.federation.opener.CONNECT_TIMEOUT_S", 0.5)
    sessions_before = sessions(hub)
    with pytest.raises(envhub.HubUnreachable) as caught:
        make(*(place.address for place in silent), hub.tcp)
    assert silent[0].address in str(caught.value) and caught.value.__cause__ is None
    assert all(place.ended() for place in silent)
    assert wait_until(lambda: left().is_within(before))
    assert sessions(hub) <= sessions_before


def test_interrupt_while_hubs_are_waited_for_ends_all_connections(
    hub: ServedHub, silent: list[SilentPlace], before: Left
) -> None:
    with pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
        make(hub.tcp, *(place.address for place in silent))
    assert all(place.ended() for place in silent)
    assert wait_until(lambda: left().is_within(before))


def test_hub_that_gets_no_env_is_left_without_a_question() -> None:
    with LyingHub() as first, LyingHub() as second:
        addresses = [first.address, second.address]
        with closing(envhub.make_vec("x", NUM_ENVS, hub=addresses, split=[NUM_ENVS, 0], lane="wire")) as envs:
            envs.reset()
    assert Op.CLOSE in first.asked
    assert {*second.asked} - {Op.HEARTBEAT} == {Op.HELLO}  # with which a connection is kept up, if it lasts


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServedHub]]:
    """Hubs of which each has an env of its own, and which make another one of different spaces."""
    with ExitStack() as stack:
        offered = ["CartPole-v1", "thing=sims:counter", "first=sims:counter"], ["CartPole-v1", "thing=sims:nested"]
        yield [
            stack.enter_context(serve(tmp_path_factory.mktemp("hub"), *names, "--name", f"hub-{number}"))
            for number, names in enumerate(offered)
        ]


def has_no_session(hub: ServedHub) -> bool:
    with envhub.connect(hub.tcp) as client:
        return not client.sessions()


def refused(hubs: Any, error: type[Exception], *texts: str, env: str = "CartPole-v1", **options: Any) -> None:
    """The making raises this error with these texts."""
    with pytest.raises(error) as caught:
        envhub.make_vec(env, 4, hub=hubs, **options)
    for text in texts:
        assert text in str(caught.value), caught.value


@pytest.mark.long
@pytest.mark.parametrize("swapped", [False, True])
def test_hubs_that_make_other_spaces_are_named(two: list[ServedHub], swapped: bool) -> None:
    first, second = two[::-1] if swapped else two
    texts = first.tcp, second.tcp, "observation spaces differ"
    refused([first.tcp, second.tcp], envhub.RequestRefused, *texts, env="thing", split=[2, 2])
    assert wait_until(lambda: all(map(has_no_session, two)), 10)


@pytest.mark.parametrize("swapped", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hub_that_does_not_know_the_env_is_named(two: list[ServedHub], swapped: bool) -> None:
    hubs = [hub.tcp for hub in (two[::-1] if swapped else two)]
    texts = "does not offer 'first'", f"(hub at {two[1].tcp})"
    refused(hubs, envhub.RequestRefused, *texts, env="first", split=[2, 2])
    assert wait_until(lambda: all(map(has_no_session, two)), 10)


@pytest.mark.parametrize("options", [{}, {"split": [2, 1, 1]}, {"split": [0, 4, 0]}], ids=str)
def test_hub_that_is_named_by_two_addresses_is_refused_with_both(two: list[ServedHub], options: Any) -> None:
    by_name = two[0].tcp.replace("127.0.0.1", "localhost")
    for hubs, first, second in (
        ([two[0].tcp, two[1].tcp, by_name], two[0].tcp, by_name),
        ([two[1].ipc, two[0].tcp, two[1].tcp], two[1].ipc, two[1].tcp),
    ):
        text = f"the same hub is named twice, as {first!r} and as {second!r}"
        refused(hubs, envhub.AddressError, text, **options)
    assert wait_until(lambda: all(map(has_no_session, two)), 10)


@pytest.mark.long
def test_hub_that_wants_a_key_is_named(two: list[ServedHub], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keyed")
    keys = keys_in(folder / "keys")
    with serve(folder, "CartPole-v1", "--keys", str(keys.path), binds=["tcp://127.0.0.1:0"]) as keyed:
        refused([two[0].tcp, keyed.tcp], envhub.AccessDenied, keyed.tcp.removeprefix("tcp://"), "key", split=[2, 2])
    assert wait_until(lambda: has_no_session(two[0]), 10)


def test_exception_of_a_constructor_has_the_hub_and_the_index_in_the_whole_batch(two: list[ServedHub]) -> None:
    each = [{}, {}, {}, {"colour": 1}]
    with pytest.raises(TypeError, match="colour") as caught:
        envhub.make_vec("thing", hub=[hub.tcp for hub in two], split=[1, 3], num_workers=2, env_kwargs=each)
    assert caught.value.__cause__ is not None
    error: Any = caught.value
    while not isinstance(error, envhub.EnvRaised):
        error = error.__cause__
    assert error.hub == "hub-1" and error.env_index == 3
    assert wait_until(lambda: all(map(has_no_session, two)), 10)


HUBS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, ValueError, "names no hub"),
    (["tcp://127.0.0.1:1"] * 2, {}, ValueError, "named twice"),
    (["tcp://127.0.0.1:1", None], {}, TypeError, "a list of addresses"),  # None is the private hub
    (["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], {"num_workers": 0}, ValueError, "num_workers=0 hosts no env"),
    (["nobody", "tcp://127.0.0.1:1"], {}, ValueError, "nobody"),
    ("tcp://127.0.0.1:1", {"split": [4]}, ValueError, "for several hubs"),
    ("tcp://127.0.0.1:1", {"on_hub_loss": "redistribute"}, ValueError, "for several hubs"),
]


@pytest.mark.parametrize(("hubs", "options", "error", "text"), HUBS, ids=str)
def test_list_of_hubs_that_makes_no_sense_is_refused(
    hubs: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    refused(hubs, error, text, **options)  # before a hub is asked


def test_session_over_several_hubs_is_not_handed_over(two: list[ServedHub]) -> None:
    with closing(envhub.make_vec("CartPole-v1", 2, hub=[hub.tcp for hub in two], split=[1, 1])) as envs:
        with pytest.raises(envhub.RequestRefused, match="several hubs has no token"):
            print(envs.token)
        with pytest.raises(envhub.RequestRefused, match="another process could take over"):
            envs.detach()
        envs.reset()
        assert not envs.closed and envs.address == f"{two[0].tcp}, {two[1].tcp}"
    with pytest.raises(envhub.SessionClosed):
        envs.detach()
    with pytest.raises((TypeError, ValueError)):
        envhub.connect([hub.tcp for hub in two])  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        envhub.make("CartPole-v1", hub=[hub.tcp for hub in two], split=[1, 1])  # type: ignore[arg-type]
