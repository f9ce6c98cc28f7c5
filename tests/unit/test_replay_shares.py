"""Replays that give way: the oldest of the client that has most."""

from __future__ import annotations

from envhub_server.catalog.replay_shares import Kept, giving_way, name_beginning, share_of


def file(written: int, client: str, nbytes: int = 1) -> Kept:
    return Kept(written, f"{name_beginning('CartPole-v1', client, f'{written:016x}')}-env0-1", nbytes)


def gone(files: list[Kept], count_max: int, bytes_max: int = 1000) -> list[int]:
    """When the files that give way were written."""
    names = giving_way(files, count_max, bytes_max)
    return [next(file.written_ns for file in files if file.name == name) for name in names]


def test_one_client_alone_may_have_the_whole_folder() -> None:
    files = [file(written, "ann") for written in range(5)]
    assert gone(files, 5) == []
    assert gone(files, 3) == [0, 1]


def test_client_that_fails_all_the_time_pushes_out_its_own_only() -> None:
    files = [file(written, "ann") for written in range(3)] + [file(written, "bob") for written in range(3, 20)]
    assert gone(files, 10) == list(range(3, 13))


def test_nothing_gives_way_while_there_is_room() -> None:
    assert gone([file(0, "ann"), *(file(written, "bob") for written in range(1, 10))], 10) == []


def test_oldest_of_all_give_way_where_nobody_has_too_much() -> None:
    files = [file(written, f"client {written % 5}") for written in range(12)]
    assert gone(files, 10) == [0, 1]


def test_new_file_outlives_those_of_many_sessions_that_are_over() -> None:
    files = [*(file(written, f"session {written}") for written in range(100)), file(100, "new"), file(101, "new")]
    assert gone(files, 100) == [0, 1]


def test_bytes_are_shared_as_files_are() -> None:
    files = [file(0, "ann"), file(1, "ann"), *(file(written, "bob", 300) for written in range(2, 6))]
    assert gone(files, 10) == [2]


def test_one_large_file_is_not_too_much() -> None:
    assert gone([file(0, "ann", 100), file(1, "bob", 700), file(2, "eve", 250)], 10) == [0]


def test_sessions_without_a_key_have_shares_of_their_own() -> None:
    one, other = (name_beginning("a", "", drawn) for drawn in ("0123456789abcdef", "fedcba9876543210"))
    assert (one, share_of(f"{one}-worker0-1")) == ("a-0123456789abcdef", "01234567")
    # The number of a request is the client's, who may count from anywhere.
    assert share_of(f"{other}-env3-12") == share_of(f"{other}-env3--7") == "fedcba98"


def test_client_has_one_share_by_all_its_sessions() -> None:
    one, other = (name_beginning("a/b", "ann", drawn) for drawn in ("0123456789abcdef", "fedcba9876543210"))
    assert one != other
    assert share_of(f"{one}-worker0-1") == share_of(f"{other}-env0-1") != ""


def test_files_that_no_hub_has_named_share_one_share() -> None:
    files = [Kept(0, "mine", 1), Kept(1, "yours", 1), file(2, "ann")]
    assert giving_way(files, 2, 1000) == ["mine"]


def test_no_limit_keeps_more_than_it_says() -> None:
    assert gone([file(0, "ann"), file(1, "bob")], 0) == [0, 1]
    assert gone([file(0, "ann", 2000)], 10) == [0]
