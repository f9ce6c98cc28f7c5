"""Factories that make the same env have the same digest, in every run; those of other envs have others."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from envhub_client.session.factories import _tokens, factories_digest
from gymnasium.envs.registration import EnvSpec


def by_rank(name: str, rank: int) -> Callable[[], Any]:
    return lambda: (gymnasium.make(name), rank)


def test_captured_values_count() -> None:
    assert factories_digest([by_rank("CartPole-v1", 0)]) != factories_digest([by_rank("Pendulum-v1", 0)])
    assert factories_digest([by_rank("CartPole-v1", 0)]) == factories_digest([by_rank("CartPole-v1", 0)])


def named_run(env_id: str, run_name: str, level: int) -> Callable[[], Any]:
    return lambda: (gymnasium.make(env_id), run_name, level)


def test_beside_an_id_other_texts_do_not_count() -> None:
    known = factories_digest([named_run("CartPole-v1", "run at 1764192743", 1)])
    assert known == factories_digest([named_run("CartPole-v1", "run at 1764192901", 1)])
    assert known != factories_digest([named_run("Pendulum-v1", "run at 1764192743", 1)])
    assert known != factories_digest([named_run("CartPole-v1", "run at 1764192743", 2)])
    assert factories_digest([named_run("no id", "a", 1)]) != factories_digest([named_run("no id", "b", 1)])


class Options:
    """Options of a class of the program's own."""

    def __init__(self, wait: float) -> None:
        self.wait = wait


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace, Options])
def test_options_tell_by_their_values(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Options, "__module__", "__main__")

    def digest(wait: float) -> str:
        options = kind(wait=wait)
        return factories_digest([lambda: options])

    assert digest(0.01) != digest(0.0)
    assert digest(0.01) == digest(0.01)


def test_values_that_differ_from_env_to_env_do_not_count() -> None:
    some = factories_digest([by_rank("CartPole-v1", rank) for rank in (1, 2, 3)])
    assert some == factories_digest([by_rank("CartPole-v1", rank) for rank in (4, 5, 6, 7)])
    assert some != factories_digest([by_rank("Pendulum-v1", rank) for rank in (1, 2, 3)])


def test_arguments_of_partials_and_specs_count() -> None:
    makes = [functools.partial(gymnasium.make, "CartPole-v1", gravity=gravity) for gravity in (9.8, 1.6)]
    assert factories_digest(makes[:1]) != factories_digest(makes[1:])
    specs = [functools.partial(gymnasium.make, EnvSpec("A-v0", "a:A", kwargs={"n": n})) for n in (1, 2)]
    assert factories_digest(specs[:1]) != factories_digest(specs[1:])


class Factory:
    """A factory of a class."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.me = self

    def __call__(self) -> Any:
        return gymnasium.make(self.name)


def test_factories_of_a_class_tell_by_their_attributes() -> None:
    assert factories_digest([Factory("a")]) != factories_digest([Factory("b")])
    assert factories_digest([Factory("a")]) == factories_digest([Factory("a")])


@dataclasses.dataclass
class Unhashable:
    """A factory that can be compared, and so has no hash."""

    name: str

    def __call__(self) -> Any:
        return gymnasium.make(self.name)


def test_factories_without_a_hash_are_factories() -> None:
    assert factories_digest([Unhashable("a")] * 2) == factories_digest([Unhashable("a"), Unhashable("a")])
    assert factories_digest([Unhashable("a")]) != factories_digest([Unhashable("b")])


class Unreadable(dict[str, int]):
    """What raises when it is looked at."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("no")

    def __iter__(self) -> Any:
        raise RuntimeError("no")


def test_factory_that_cannot_be_looked_at_has_no_digest() -> None:
    assert factories_digest([functools.partial(gymnasium.make, Unreadable(a=1))]) == ""


def test_class_that_runs_the_envs_counts() -> None:
    make = functools.partial(gymnasium.make, "a")
    assert len({factories_digest([make], runner) for runner in (None, Factory, Unhashable, "mine:Runner")}) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(10**6)),
        lambda: dict.fromkeys(range(10**6)),
        lambda: "x" * 10**8,
        lambda: {*range(10**6)},
    ],
    ids=["list", "dict", "str", "set"],
)
def test_large_values_count_by_their_size_alone(make: Callable[[], Any]) -> None:
    large = make()
    tokens = list(_tokens(functools.partial(gymnasium.make, "x", table=large), 0, set()))
    assert len(tokens) < 20 and max(map(len, tokens)) < 2000
