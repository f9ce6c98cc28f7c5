"""Hubs that cannot share a vector env are refused at the start, and leave no session behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from envhub_client.connection import known_hubs
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, serve, wait_until

import envhub


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


@pytest.mark.parametrize("swapped", [False, True])
def test_hub_that_does_not_know_the_env_is_named_with_one_that_does(two: list[ServedHub], swapped: bool) -> None:
    hubs = [hub.tcp for hub in (two[::-1] if swapped else two)]
    texts = "does not offer 'first'", f"(hub at {two[1].tcp})", f"{two[0].tcp} made these envs"
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


def test_hub_that_is_named_by_its_address_and_a_name_that_is_kept_is_refused_with_both(
    two: list[ServedHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hubs.keep("mine", two[0].tcp)
    refused(["mine", two[0].tcp], envhub.AddressError, f"named twice, as 'mine' and as {two[0].tcp!r}")


def test_one_of_several_names_of_a_hub_may_be_chosen(two: list[ServedHub]) -> None:
    hubs = [two[0].tcp, two[0].tcp.replace("127.0.0.1", "localhost")]
    with closing(envhub.make_vec("CartPole-v1", 2, hub=hubs, hub_index=1)) as envs:
        envs.reset()
        assert envs.address == hubs[1]


def test_hub_that_wants_a_key_is_named(two: list[ServedHub], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("keyed")
    keys = KeyFolder(folder / "keys")
    keys.make_secret()
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
    (
        ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"],
        {"num_workers": 0},
        ValueError,
        "num_workers=0 hosts no env",
    ),
    (["nobody", "tcp://127.0.0.1:1"], {}, ValueError, "nobody"),
    ("tcp://127.0.0.1:1", {"split": [4]}, ValueError, "for several hubs"),
    ("tcp://127.0.0.1:1", {"on_hub_loss": "redistribute"}, ValueError, "for several hubs"),
]


@pytest.mark.parametrize(("hubs", "options", "error", "text"), HUBS, ids=str)
def test_list_of_hubs_that_makes_no_sense_is_refused(
    hubs: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    refused(hubs, error, text, **options)  # before a hub is asked


def test_option_of_private_hubs_is_refused(two: list[ServedHub]) -> None:
    refused([hub.tcp for hub in two], envhub.RequestRefused, "python: for private hubs", python="python3")


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
