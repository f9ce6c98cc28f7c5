"""Whatever a hub answers, its client raises or goes on: it neither hangs, allocates without end, nor runs anything."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import zmq
from envhub_client import deadline
from envhub_client.envs.arguments import environment
from envhub_client.session.description import REMOTE
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from hubs import wait_until
from lying_hub import NUM_ENVS, SPACE, LyingHub, made

import envhub
from envhub.protocol.client import CUTS_MAX
from envhub.protocol.messages import (
    Done,
    EnvNames,
    Failure,
    HeartbeatReply,
    Observed,
    Op,
    Table,
    Templates,
    Welcome,
    pack_rows,
)
from envhub.transport import sockets
from envhub.values import codec
from envhub.values.info_columns import Rows, pack_columns


def connected(hub: LyingHub, **options: Any) -> closing[Any]:
    return closing(envhub.make_vec("counter", NUM_ENVS, hub=hub.address, **options))


# --- what a session is said to be -----------------------------------------------------------------------------------


def box(*shape: int) -> bytes:
    bound = np.zeros((), np.float32)
    return codec.encode({"space": "Box", "dtype": "<f4", "shape": [*shape], "low": bound, "high": bound})


SESSIONS: dict[Op, dict[str, Any]] = {
    Op.MAKE: {
        "fewer envs than asked": made(num_envs=NUM_ENVS - 1),
        "more envs than asked": made(num_envs=1 << 20),
        "no workers": made(num_workers=0),
        "a huge observation": made(observation_spaces=[box(10**6, 10**6)]),
        "observations that are huge together": made(observation_spaces=[box(2**27 + 1)]),
        "a huge action": made(action_space=box(2**27 + 1)),
        "no observation space": made(observation_spaces=[]),
        "an observation space too many": made(observation_spaces=[SPACE] * 3),
        "metadata that are no map": made(metadata=codec.encode([1])),
        "metadata that are no value": made(metadata=b"\xc1"),
        "a space that is no map": made(action_space=codec.encode([1])),
        "a space that is no value": made(action_space=b"\xc1"),
        "an unknown autoreset mode": made(autoreset_mode="Sometimes"),
    },
    Op.ATTACH: {
        "steps of another number of envs": made(autoreset_mode="NextStep", observation_mode="same", steps=[0]),
        "a million envs": made(
            num_envs=1 << 20, autoreset_mode="NextStep", observation_mode="same", steps=[0] * NUM_ENVS
        ),
    },
    Op.OBSERVE: {
        "steps that are no word": Observed(NUM_ENVS, [1 << 63] * NUM_ENVS, [True] * NUM_ENVS, [SPACE]),
        "steps of another number of envs": Observed(NUM_ENVS, [0], [True] * NUM_ENVS, [SPACE]),
        "given of another number of envs": Observed(NUM_ENVS, [0] * NUM_ENVS, [True], [SPACE]),
        "a million envs": Observed(1 << 20, [0] * NUM_ENVS, [True] * NUM_ENVS, [SPACE]),
        "huge observations": Observed(NUM_ENVS, [0] * NUM_ENVS, [True] * NUM_ENVS, [box(2**27 + 1)]),
        "no space": Observed(NUM_ENVS, [0] * NUM_ENVS, [True] * NUM_ENVS, []),
    },
}


@pytest.mark.parametrize(("op", "lie"), [(op, lie) for op, lies in SESSIONS.items() for lie in lies])
def test_session_that_is_not_as_asked_is_refused(op: Op, lie: str) -> None:
    refused = pytest.raises(envhub.errors.RemoteProtocolError if op is Op.ATTACH else envhub.errors.EnvHubError)
    with LyingHub({op: (SESSIONS[op][lie], ())}) as hub, envhub.connect(hub.address) as client, refused:
        if op is Op.MAKE:
            client.make_vec("counter", NUM_ENVS)
        else:
            client.attach("00" * 16, observe=op is Op.OBSERVE)


# --- frames -----------------------------------------------------------------------------------------------------------

ONE = codec.encode(1)
CALLED: dict[str, Sequence[bytes]] = {
    "no frame": [],
    "a frame too many": [pack_rows([(0, ONE), (1, ONE)]), b""],
    "an env too few": [pack_rows([(0, ONE)])],
    "one env twice": [pack_rows([(0, ONE), (0, ONE)])],
    "another env": [pack_rows([(0, ONE), (7, ONE)])],
    "half a row": [pack_rows([(0, ONE), (1, ONE)])[:-1]],
    "a result that is no value": [pack_rows([(0, ONE), (1, b"\xc1")])],
}


@pytest.mark.parametrize("frames", CALLED.values(), ids=CALLED.keys())
@pytest.mark.parametrize("ask", [lambda envs: envs.call("n"), lambda envs: envs.render()], ids=["call", "render"])
def test_results_of_a_call_are_one_of_each_env(frames: Sequence[bytes], ask: Any) -> None:
    with LyingHub({Op.CALL: (Done(), frames)}) as hub, connected(hub) as envs:
        with pytest.raises(envhub.errors.RemoteProtocolError):
            ask(envs)
        envs.reset()


def test_call_of_a_method_without_a_result_breaks_the_protocol() -> None:
    frames = [pack_rows([(0, ONE), (1, b"")])]  # as of an env that is not rendered before its reset
    with LyingHub({Op.CALL: (Done(), frames)}) as hub, connected(hub) as envs:
        with pytest.raises(envhub.errors.RemoteProtocolError, match="cannot be read"):
            envs.call("n")
        assert len(envs.render()) == NUM_ENVS


OBSERVATIONS, RESULTS = bytes(16 * NUM_ENVS), bytes(10 * NUM_ENVS)
STEPPED: dict[str, Sequence[bytes]] = {
    "none": [],
    "no results": [OBSERVATIONS],
    "short observations": [OBSERVATIONS[1:], RESULTS],
    "long observations": [OBSERVATIONS * 2, RESULTS],
    "short results": [OBSERVATIONS, RESULTS[1:]],
    "long results": [OBSERVATIONS, RESULTS * 2],
    "infos of no row": [OBSERVATIONS, RESULTS, b"x"],
    "infos of another env": [OBSERVATIONS, RESULTS, pack_rows([(2, codec.encode({}))])],
    "columns of nothing": [OBSERVATIONS, RESULTS, b"", b"x"],
    "a frame too many": [OBSERVATIONS, RESULTS, b"", b"", b""],
    "a hundred frames": [OBSERVATIONS, RESULTS, *[b""] * 100],
    "an info that is no map": [OBSERVATIONS, RESULTS, pack_rows([(0, codec.encode([1]))])],
}


@pytest.mark.parametrize("frames", STEPPED.values(), ids=STEPPED.keys())
@pytest.mark.parametrize("copy", [True, False])
def test_frames_of_a_step_are_counted_and_measured(frames: Sequence[bytes], copy: bool) -> None:
    with LyingHub({Op.STEP: (Done(), frames)}) as hub, connected(hub, copy=copy) as envs:
        envs.reset()
        with pytest.raises(envhub.errors.RemoteProtocolError):
            envs.step([0, 0])


@pytest.mark.parametrize("env", [-1, NUM_ENVS, 1 << 40])
def test_failure_of_an_env_that_is_none_breaks_the_protocol(env: int) -> None:
    failure = Failure("worker_died", "request", "it ended", env_index=env)
    with LyingHub({Op.STEP: (failure, ())}) as hub, connected(hub) as envs:
        envs.reset()
        with pytest.raises(envhub.errors.RemoteProtocolError, match=hub.address):
            envs.step([0, 0])
    with LyingHub({Op.SEND: (Done(), ()), Op.RECEIVE: (failure, ())}) as hub, connected(hub) as envs:
        envs.reset()
        envs.send(np.array([0, 0]), np.array([0, 1]))
        with pytest.raises(envhub.errors.RemoteProtocolError, match=hub.address):
            envs.recv(1, timeout=10)


def test_hub_that_accepts_no_message_or_has_no_id_breaks_the_protocol() -> None:
    for lie in ({Op.HELLO: (Welcome("1", "1", False, {"message_bytes_max": 0}), ())}, {}):
        with LyingHub(lie) as hub:
            hub.id = hub.id if lie else 0
            with pytest.raises(envhub.errors.RemoteProtocolError, match=f"{hub.address} broke the protocol"):
                envhub.connect(hub.address, timeout=10)


BAD_INFO = pack_rows([(0, codec.encode([1]))])
HELLO = {Op.HELLO: (Welcome("1", "1", False, {}), ()), Op.SEND: (Done(), ())}


def connected_to_two(*hubs: LyingHub) -> closing[Any]:
    options: Any = {"split": [NUM_ENVS] * 2, "on_hub_loss": "recreate", "restart_wait": 30.0, "lane": "wire"}
    return closing(envhub.make_vec("counter", 2 * NUM_ENVS, hub=[hub.address for hub in hubs], **options))


def test_info_that_cannot_be_read_costs_no_row_of_another_hub() -> None:
    lies = Done(), [OBSERVATIONS, RESULTS, BAD_INFO]
    with LyingHub(HELLO) as honest, LyingHub(HELLO) as other, connected_to_two(honest, other) as envs:
        envs.reset()
        well, other.answers[Op.STEP] = other.answers[Op.STEP], lies
        *_, truncations, infos = envs.step([0] * 4)
        assert truncations.tolist() == [False, False, True, True]
        assert f"{other.address} broke the protocol" in infos["env_failure"][2].message
        other.answers[Op.STEP] = well
        assert not envs.step([0] * 4)[3].any()
        one = np.arange(1), bytes(16), bytes(10)
        for hub, infos in ((honest, b""), (other, BAD_INFO)):
            hub.answers[Op.RECEIVE] = Done(), [one[0].tobytes(), *one[1:], infos]
        envs.send([0, 0], [0, 2])
        received = dict[int, bool]()
        while len(received) < 2:
            *_, truncations, _, env_ids = envs.recv(1, timeout=30)
            received.update(zip(env_ids.tolist(), truncations.tolist(), strict=True))
        assert received == {0: False, 2: True}


def test_hub_that_has_rows_again_and_is_silent_delays_no_row_of_another() -> None:
    with LyingHub(HELLO) as honest, LyingHub(HELLO) as other, connected_to_two(honest, other) as envs:
        envs.reset()
        envs.send([0, 0], [0, 2])
        honest.answers[Op.RECEIVE] = Done(), [np.arange(1).tobytes(), bytes(16), bytes(10), b""]
        other.answers[Op.RECEIVE] = Failure("session_lost", "session", "it has ended"), ()
        received: list[int] = []
        while len(received) < 2:
            received += envs.recv(1, timeout=30)[-1].tolist()
        assert wait_until(lambda: other.asked.count(Op.MAKE) == 2)
        del other.answers[Op.SEND]
        envs.send([0], [2])
        envs.send([0], [0])
        assert envs.recv(1, timeout=30)[-1].tolist() == [0]


def test_hub_that_breaks_the_protocol_in_each_session_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lies, left_s = (Done(), [OBSERVATIONS, BAD_INFO]), list[float]()
    with LyingHub({Op.RESET: lies}) as hub, connected(hub, on_hub_loss="recreate") as envs:
        lane = envs._session.lane
        wait = lane.wait
        monkeypatch.setattr(lane, "wait", lambda timeout: (left_s.append(timeout), wait(timeout))[1])
        envs.reset_async()
        with pytest.raises(envhub.errors.RemoteProtocolError, match=f"{hub.address} broke the protocol"):
            envs.reset_wait(timeout=60)
        assert hub.asked.count(Op.MAKE) == 3
        assert left_s == sorted({*left_s}, reverse=True)  # one timeout for all attempts


LONG = "long " * (1 << 18)


def test_texts_of_a_hub_are_no_longer_than_those_of_an_honest_one(caplog: pytest.LogCaptureFixture) -> None:
    failure = {"cause": "crash", "message": LONG, "traceback": LONG, "log_tail": LONG}
    lies = {
        "request": Failure("refused", "request", LONG, log_tail=LONG),
        "env": Failure("env_raised", "env", LONG, 0, 0, "x.Y", b"", LONG),
    }
    info = pack_rows([(0, codec.encode({"env_failure": failure}))])
    with LyingHub({Op.STEP: (Done(), [OBSERVATIONS, RESULTS, info])}, notice=LONG) as hub, connected(hub) as envs:
        envs.reset()
        for text in envs.step([0, 0])[4]["env_failure"][0].values():
            assert text is None or isinstance(text, int) or len(text) <= 1 << 14
        for scope, lie in lies.items():
            hub.answers[Op.STEP] = lie, ()
            with pytest.raises(envhub.errors.EnvHubError) as caught:
                envs.step([0, 0])
            assert len(str(caught.value)) < (1 << 14 if scope == "request" else 1 << 18)
    assert max(map(len, caplog.messages)) < 5000


@pytest.mark.parametrize("rows", [[], [{}, {}]])
def test_health_and_counters_are_one_row(rows: list[dict[str, Any]]) -> None:
    answer = Table(rows), ()
    with LyingHub({Op.HEALTH: answer, Op.STATS: answer}) as hub, envhub.connect(hub.address) as client:
        for ask in (client.health, client.stats):
            with pytest.raises(envhub.errors.RemoteProtocolError):
                ask()


HEALTHY = {"status": "ok", "sessions": 0, "uptime_s": 1.0, "loop_lag_s": 0.0, "unready": {}}


@pytest.mark.parametrize(
    "lie",
    [{"status": None}, {"sessions": "many"}, {"uptime_s": "long"}, {"loop_lag_s": [1]}, {"unready": "all"}],
    ids=lambda lie: next(iter(lie)),
)
def test_health_that_is_none_is_refused(lie: dict[str, Any]) -> None:
    answer = Table([{**HEALTHY, **lie}]), ()
    with LyingHub({Op.HEALTH: answer}) as hub, envhub.connect(hub.address) as client:
        with pytest.raises(envhub.errors.RemoteProtocolError, match=f"says of its health {next(iter(lie))}="):
            client.health()
        hub.answers[Op.HEALTH] = Table([HEALTHY]), ()
        assert client.health() == HEALTHY


def test_honest_answers_are_taken() -> None:
    called = [pack_rows([(0, ONE), (1, ONE)])]
    with LyingHub({Op.CALL: (Done(), called)}) as hub, connected(hub) as envs:
        envs.reset()
        assert envs.step([0, 0])[0].shape == (NUM_ENVS, 2) and envs.call("n") == (1, 1)


def test_step_whose_infos_have_a_form_that_the_hub_does_not_tell_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "ANSWER_S", 0.2)
    columns = pack_columns([Rows(1, np.arange(NUM_ENVS), np.zeros((NUM_ENVS, 8), np.uint8))])
    answers = {Op.STEP: (Done(), [OBSERVATIONS, RESULTS, b"", columns]), Op.HEARTBEAT: (HeartbeatReply("answered"), ())}
    with LyingHub(answers) as hub, connected(hub) as envs:
        envs.reset()
        envs.step_async([0, 0])
        protocol = envs._session.connection.protocol
        assert wait_until(lambda: protocol.answer is not None)  # to STEP; only that to TEMPLATES is late
        with pytest.raises(envhub.HubTimeout, match="TEMPLATES"):
            envs.step_wait(timeout=0.1)
        hub.answers[Op.TEMPLATES] = Templates([1], [codec.encode({"level": 1.5})]), ()
        assert envs.step_wait(timeout=10)[4]["level"].tolist() == [0, 0]


# --- code and texts ---------------------------------------------------------------------------------------------------


def hostile_spec(folder: Path) -> bytes:
    command = {"command": f"touch {folder}/ran"}
    wrapper = WrapperSpec("Evil", "os:system", command)
    spec = EnvSpec(
        "counter", "os:system", vector_entry_point="os:system", kwargs=command, additional_wrappers=(wrapper,)
    )
    return codec.encode(spec)


def test_spec_of_a_hub_runs_nothing(tmp_path: Path) -> None:
    with LyingHub({Op.MAKE: (made(spec=hostile_spec(tmp_path)), ())}) as hub, connected(hub) as envs:
        assert envs.env_spec.id == envs.spec.id == "counter"
        for spec in (envs.env_spec, envs.spec):
            for again in (gym.make, gym.make_vec):
                with pytest.raises((envhub.errors.RequestRefused, gym.error.Error)):
                    again(spec)
    assert not [*tmp_path.iterdir()]


def test_spec_of_a_hub_makes_no_env_by_envhubs_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("ENVHUB_SSH", str(ssh))
    (tmp_path / "of_the_hubs_choice.py").write_text(f"open({f'{tmp_path}/ran'!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = gym.spec(REMOTE)
    for arguments in ({"env_id": "of_the_hubs_choice:Env-v0"}, {"env_id": "Env-v0", "url": "ssh://somewhere"}):
        spec = EnvSpec(own.id, own.entry_point, vector_entry_point=own.vector_entry_point, kwargs=arguments)
        with LyingHub({Op.MAKE: (made(spec=codec.encode(spec)), ())}) as hub, connected(hub) as envs:
            for again in (gym.make, gym.make_vec):
                with pytest.raises(envhub.errors.RequestRefused, match="this spec came from a hub"):
                    again(envs.env_spec)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("kwargs", "runs"), [({}, True), ({"g": 9.0}, True), ({"g": 8.0}, False), ({"x": 1}, False)])
def test_spec_of_a_hub_runs_with_the_programs_own_arguments_only(kwargs: dict[str, Any], runs: bool) -> None:
    own = gym.spec("Pendulum-v1")
    spec = EnvSpec(own.id, own.entry_point, kwargs=kwargs)
    with (
        LyingHub({Op.MAKE: (made(spec=codec.encode(spec)), ())}) as hub,
        closing(envhub.make_vec("Pendulum-v1", NUM_ENVS, hub=hub.address, g=9.0)) as envs,
    ):
        written_down = environment(envs)
        if runs:
            gym.make(envs.env_spec).close()
        else:
            with pytest.raises(envhub.errors.RequestRefused, match="this spec came from a hub"):
                gym.make(envs.env_spec)
    assert written_down is not None and written_down.id == (own.id if runs else REMOTE)


def test_spec_of_a_hub_names_no_module() -> None:
    with LyingHub({Op.MAKE: (made(spec=codec.encode(EnvSpec("os:counter"))), ())}) as hub, connected(hub) as envs:
        assert envs.env_spec is None and envs.spec is None


def test_what_is_written_down_of_a_hubs_env_is_that_hubs_only() -> None:
    own = gym.spec(REMOTE)
    kwargs = {"env_id": "of_the_hubs_choice:Env-v0", "url": None, "record": "/anywhere"}
    for env_id in (REMOTE, "Unknown-v0"):
        spec = codec.encode(EnvSpec(env_id, own.entry_point, kwargs=kwargs))
        with LyingHub({Op.MAKE: (made(spec=spec), ())}) as hub, connected(hub) as envs:
            found = environment(envs)
            assert found is not None and found.id == REMOTE
            assert found.kwargs == {"env_id": env_id, "url": hub.address, "env_kwargs": kwargs}


ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202ered\ttab\nnewline"
FAILURES = {
    "of a request": Failure(ESCAPE, "request", ESCAPE, log_tail=ESCAPE),
    "of a worker": Failure("worker_died", "request", ESCAPE, log_tail=ESCAPE),
    "of an env": Failure("env_raised", "env", ESCAPE, 0, 0, "x." + ESCAPE, b"", ESCAPE),
    "of an env, of a class that is known": Failure(
        "env_raised",
        "env",
        ESCAPE,
        0,
        0,
        "builtins.ValueError",
        codec.encode([ESCAPE]),
        ESCAPE,
        "",
        codec.encode({"__notes__": [ESCAPE]}),
    ),
}


def brief(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_errors_that_reach_a_terminal_have_no_control_characters(failure: Failure) -> None:
    kind = ValueError if failure.type == "builtins.ValueError" else envhub.errors.EnvHubError
    with LyingHub({Op.STEP: (failure, ())}) as hub, connected(hub) as envs:
        envs.reset()
        with pytest.raises(kind) as caught:
            envs.step([0, 0])
        text = brief(caught.value)
    assert "\\x1b]0;title\\x07" in text and "red\ttab\nnewline" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_markup_of_a_hub_is_text() -> None:
    row = {**HEALTHY, "status": "[link=https://elsewhere]ok[/link]"}
    with LyingHub({Op.HEALTH: (Table([row]), ())}) as hub:
        ran = subprocess.run([sys.executable, "-m", "envhub", "health", hub.address], capture_output=True, text=True)
    assert ran.stdout.startswith(str(row["status"]))


def test_notices_and_env_failures_have_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    info = codec.encode({"env_failure": {"cause": "crash", "message": ESCAPE, "traceback": ESCAPE, "log_tail": ESCAPE}})
    answer = Done(), [OBSERVATIONS, RESULTS, pack_rows([(0, info)])]
    with LyingHub({Op.STEP: answer, Op.LIST: (EnvNames([ESCAPE]), ())}, notice=ESCAPE) as hub, connected(hub) as envs:
        envs.reset()
        failure = envs.step([0, 0])[4]["env_failure"][0]
        with envhub.connect(hub.address) as client:
            texts = [caplog.text, failure.message, failure.traceback, failure.log_tail, *client.envs()]
    assert not set("".join(texts)) & set("\x1b\x07\x9b\u202e")
    assert all("\\x1b]0;title" in text for text in texts)


def test_notices_of_a_hub_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with LyingHub(notice="note " * 10_000) as hub, connected(hub) as envs:
        for _ in range(20):
            envs.reset()
    lines = [record.getMessage() for record in caplog.records if "note" in record.getMessage()]
    assert len(lines) == 16 and max(map(len, lines)) < 5000


# --- floods -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_hub_that_pushes_without_end_holds_up_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with LyingHub(pings=1) as hub, envhub.connect(hub.address) as client:
        client.timeout = 1.0
        monkeypatch.setattr(sockets, "receive", lambda *_: [zmq.Frame(hub.ping)])
        with pytest.raises(envhub.HubTimeout):
            client.health()


@pytest.mark.long
def test_hub_that_floods_a_client_and_ends_does_not_end_it() -> None:
    program = """
import sys, time, envhub
from envhub.protocol.messages import Op, Question
from envhub_client.connection import zeromq_transport
zeromq_transport.HEARTBEAT_MS = 50
client = envhub.connect(sys.argv[1])
client._connection.send(Op.HEALTH, Question())
time.sleep(0.3)
print("full", flush=True)
time.sleep(0.7)
print("lives", flush=True)
"""
    with LyingHub(pings=3000) as hub:
        run = [sys.executable, "-c", program, hub.address]
        client = subprocess.Popen(run, stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdout.readline() == b"full\n"
    with client:
        assert client.stdout.read() == b"lives\n"


def test_request_that_ends_every_connection_is_given_up_and_the_session_goes_on() -> None:
    answers = {Op.HEARTBEAT: (HeartbeatReply("unknown"), ())}
    with LyingHub(answers, frame_bytes_max=1 << 16) as hub, connected(hub) as envs:
        envs.reset()
        with pytest.raises(envhub.RequestRefused, match=f"^{CUTS_MAX} connections .* after the RESET request"):
            envs.reset(options={"text": "x" * (1 << 17)})
        assert envs.reset()[0].shape == (NUM_ENVS, 2)
