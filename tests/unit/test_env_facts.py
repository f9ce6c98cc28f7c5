"""Facts about envs that sessions of a hub have made."""

from __future__ import annotations

from envhub_server.catalog.registry import ENVS_MAX, EnvFacts, EnvFactsTable, key

from envhub.protocol.messages import Make

ALONE, SHARING = EnvFacts(alone=True), EnvFacts(("torch",))


def test_key_differs_between_envs_and_is_the_same_for_any_number_of_them() -> None:
    makes = [
        Make(4, "CartPole-v1"),
        Make(4, "CartPole-v0"),
        Make(4, "CartPole-v1", kwargs=b"k"),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b""]),
        Make(4, "CartPole-v1", wrappers=["a:B"], wrapper_kwargs=[b"x"]),
        Make(4, factories=b"f", factories_digest="d"),
        Make(4, factories=b"f", factories_digest="e"),
    ]
    assert len({key(make) for make in makes}) == len(makes)
    assert key(Make(4, "CartPole-v1", seed := b"k")) == key(Make(64, "CartPole-v1", seed, num_workers=7))
    assert key(Make(4, factories=b"f", factories_digest="d")) == key(Make(4, factories=b"g", factories_digest="d"))


def test_last_facts_count_and_those_used_longest_ago_make_room() -> None:
    table, makes = EnvFactsTable(), [Make(1, f"A-v{number}") for number in range(ENVS_MAX + 1)]
    assert table.find(makes[0]) == EnvFacts()
    for make in makes[:-1]:
        table.note(make, SHARING)
    table.note(makes[0], ALONE)
    table.note(makes[-1], SHARING)
    assert [table.find(makes[number]) for number in (0, 1, 2, -1)] == [ALONE, EnvFacts(), SHARING, SHARING]


def test_env_that_cannot_be_told_from_others_is_not_remembered() -> None:
    table = EnvFactsTable()
    for make in (Make(4, factories=b"f"), Make(4, "CartPole-v1", runner=b"r")):
        table.note(make, ALONE)
        assert key(make) == "" and table.find(make) == EnvFacts()
