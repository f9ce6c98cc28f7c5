"""Names of fleets and of their actors."""

from __future__ import annotations

import pytest

from envhub.errors import AddressError
from envhub.fleet.hub_actor import actor_name, hub_of
from envhub.transport.address import check_fleet_name


def test_actor_is_of_one_fleet_and_one_hub() -> None:
    assert actor_name("sims", 12) == "envhub:sims:12"
    assert hub_of("envhub:sims:12") == ("sims", 12)
    for name in ("envhub:sims", "envhub:sims:keeper", "sims:12", "other:sims:1", "envhub:a:b:1"):
        assert hub_of(name) is None


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "-a", "a b", "a" * 57, "head:10001"])
def test_name_that_no_fleet_can_have_is_refused(name: str) -> None:
    with pytest.raises(AddressError, match="is no name for a fleet"):
        check_fleet_name(name)
