"""Envs that harm their worker, or make it a hostile one, harm no other session and not the hub."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import odd_sims
import pytest
from combinations import each_value
from hubs import ServedHub, serve, wait_until

import envhub

MIB = 1 << 20
OFFERED = ["wordy=odd_sims:Wordy", "babbler=odd_sims:Babbler", "counter=sims:counter"]


@pytest.fixture(scope="module")
def plagued(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    secrets = ["REGISTRY_TOKEN", "LANGCHAIN_API_KEY", "NVIDIA_API_KEY", "TF_VAR_password", "LD_SDK_KEY"]
    environ = {"SIM_MODE": "fast", **dict.fromkeys(secrets, "secret")}
    with serve(tmp_path_factory.mktemp("plagued"), *OFFERED, "--worker-env", "SIM_MODE", environ=environ) as hub:
        yield hub


@pytest.fixture(autouse=True)
def _honest(plagued: ServedHub) -> Iterator[None]:
    """A session beside, which steps at the end as before, on a hub whose process stays the same."""
    with contextlib.closing(envhub.make_vec("counter", 2, hub=plagued.tcp)) as envs:
        envs.reset()
        yield
        envs.step_async(np.zeros(2, int))
        assert envs.step_wait(timeout=10)[0][:, 0].tolist() == [1, 1]
    assert plagued.process.poll() is None


# --- what is too large ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lane", "mode"), each_value(["wire", "auto"], ["NextStep", "SameStep"], others=pytest.mark.long)
)
def test_info_of_two_mebibytes_is_dropped_and_flagged(plagued: ServedHub, lane: str, mode: str) -> None:
    options = {"hub": plagued.ipc, "lane": lane, "autoreset_mode": mode}
    with contextlib.closing(envhub.make_vec("wordy", 2, env_kwargs={"length": 2}, **options)) as envs:
        envs.reset()
        infos = envs.step(np.array([0, 2]))[4]
        assert infos["words"][0] == b"" and infos["_words"].tolist() == [True, False]
        assert infos["info_dropped"].tolist() == infos["_info_dropped"].tolist() == [False, True]
        observations, _, terminations, _, infos = envs.step(np.array([0, 2]))
        assert terminations.all()
        assert infos["_info_dropped"].tolist() == [False, True]
        if mode == "SameStep":
            assert [final[0] for final in infos["final_obs"]] == [2, 2] and observations[:, 0].tolist() == [0, 0]
            assert infos["_final_info"].all() and infos["final_info"]["_words"].tolist() == [True, False]
    assert "an info of 20971" in plagued.log and "info_bytes_max=" in plagued.log


def test_info_of_a_program_of_ones_own_may_be_larger() -> None:
    with contextlib.closing(envhub.make_vec([lambda: odd_sims.Wordy()])) as envs:
        envs.reset()
        assert len(envs.step(np.array([2]))[4]["words"][0]) == 2 * MIB


def test_results_of_a_call_that_are_too_large_fail_the_call_alone(plagued: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("wordy", 1, hub=plagued.tcp)) as envs:
        envs.reset()
        assert len(envs.call("many_words", 60)[0]) == 60 * MIB
        with pytest.raises(ValueError, match=r"a result of a call .* bytes; a worker's has at most 67108864"):
            envs.call("many_words", 65)
        assert envs.step(np.zeros(1, int))[0][0, 0] == 1


@pytest.mark.parametrize("mebibytes", [2, 65])
def test_large_info_that_a_worker_forges_reaches_nobody(plagued: ServedHub, mebibytes: int) -> None:
    with contextlib.closing(envhub.make_vec("wordy", 1, hub=plagued.tcp, lane="wire", restart_wait=20.0)) as envs:
        envs.reset()
        envs.set_attr("forged", mebibytes)
        infos = envs.step(np.zeros(1, int))[4]
        if mebibytes > 64:
            assert "of at most 67108864" in infos["env_failure"][0]["message"]
        else:
            assert infos["words"][0] == b"" and wait_until(lambda: '"info_bytes": 2097152' in plagued.log)


def test_worker_that_speaks_without_an_end_holds_up_nobody_else(plagued: ServedHub) -> None:
    with (
        contextlib.closing(envhub.make_vec("babbler", 1, hub=plagued.tcp, lane="wire")) as envs,
        envhub.connect(plagued.tcp) as client,
    ):
        envs.reset()
        envs.call("babble")
        for _ in range(3):
            envs.step_async(np.zeros(1, int))
            assert client.health()["status"] == "ok"
            assert envs.step_wait(timeout=10)[4]["words"][0] == bytes(4096)
        envs.close(terminate=True)


# --- bells ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_worker_that_fills_its_bells_holds_up_nobody_else(plagued: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("wordy", 2, num_workers=2, hub=plagued.ipc, lane="wire")) as envs:
        envs.reset()
        for row in range(2):  # one after the other, because a bell that both have blocks one of them
            assert envs.call_some([row], "fill_bells")[0] >= 3
        for _ in range(3):
            with contextlib.suppress(envhub.EnvHubError):
                envs.step_async(np.zeros(2, int))
                envs.step_wait(timeout=1)
        with contextlib.suppress(envhub.EnvHubError):
            envs.close(timeout=5)


def test_client_that_fills_its_bell_holds_up_nobody_else(plagued: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("counter", 2, hub=plagued.ipc, restart_wait=0.0)) as envs:
        envs.reset()
        pids = set(envs.call("pid"))
        for bell in (envs._session.lane._bell, *envs._session.lane._bells):
            odd_sims.fill_bell(bell)
        before = plagued.log.count("worker_exited")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: plagued.log.count("worker_exited") >= before + len(pids))
        with envhub.connect(plagued.tcp) as client:
            for _ in range(5):
                assert client.health()["status"] == "ok"


# --- memory and rights ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_make_that_exhausts_memory_fails_alone(tmp_path: Path) -> None:
    offered = ["counter=sims:counter", "stacked=odd_sims:stacked", "--worker-memory", str(1 << 30)]
    with serve(tmp_path, *offered) as hub, contextlib.closing(envhub.make_vec("counter", 2, hub=hub.tcp)) as envs:
        envs.reset()
        with pytest.raises(envhub.EnvRaised, match="--worker-memory 1073741824 bytes"):
            envhub.make_vec("stacked", 1, hub=hub.tcp, env_kwargs={"stack_size": 60_000_000})
        assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [1, 1]


def test_workers_of_a_public_hub_gain_no_rights_and_write_no_core(plagued: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("counter", 1, hub=plagued.tcp)) as envs:
        (pid,) = envs.call("pid")
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_workers_of_a_public_hub_have_the_named_variables_and_no_secrets(plagued: ServedHub) -> None:
    with contextlib.closing(envhub.make_vec("counter", 1, hub=plagued.tcp)) as envs:
        (pid,) = envs.call("pid")
        found = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"SIM_MODE=fast\0" in found and b"PATH=" in found and b"=secret" not in found
    assert b"REGISTRY_TOKEN=secret" in Path(f"/proc/{plagued.process.pid}/environ").read_bytes()
