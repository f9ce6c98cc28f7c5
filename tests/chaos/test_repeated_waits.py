"""Ctrl-C at every line of every wait: it is called again, and returns or raises what it would have.

The short version has every 101st line, the whole one (``pytest -m chaos -s``) all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from chaos.interrupts import Interrupt
from several_hubs import SeveralHubs, several_hubs

import envhub

ROWS = 3
WAIT_S = 30.0
SCENES = ["shared", "wire", "two hubs", "recreate", "two hubs, recreate"]

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",  # an interrupt in a destructor
    "ignore:.*while waiting for a pending call",
)
Envs = envhub.HubVectorEnv


class Wait(NamedTuple):
    """Something to wait for, and what it returns or raises once the envs were stepped so often."""

    begin: Callable[[Envs], Any]
    wait: Callable[[Envs], Any]
    wanted: Callable[[int], Any]
    steps: bool = True  # whether each time is a step


def rewards(value: int) -> np.ndarray:
    return np.full(ROWS, value)


def seen(found: Any) -> Any:
    """The counts and infos of a step."""
    observations, infos = found[0], found[4]
    name = next(name for name in infos if name.startswith("count"))
    return observations[:, 0].tolist(), name, infos[name].tolist()


def stepped(count: int) -> Any:
    return [count] * ROWS, f"count{count % 40}", [count] * ROWS


def raised(wait: Callable[[], Any]) -> str:
    try:
        found = wait()
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{found} in place of an error")


# Those with a half that begins; what the wait returns is kept until it is returned.
WAITS = {
    "step_wait": Wait(lambda envs: envs.step_async(rewards(1)), lambda envs: seen(envs.step_wait(WAIT_S)), stepped),
    "step_wait, raising": Wait(
        lambda envs: envs.step_async(np.array([1, 1, 9])),
        lambda envs: raised(lambda: envs.step_wait(WAIT_S)),
        "not allowed at {}".format,
    ),
    "reset_wait": Wait(
        lambda envs: envs.reset_async(seed=1),
        lambda envs: envs.reset_wait(WAIT_S)[0][:, 0].tolist(),
        lambda count: [0] * ROWS,
        False,
    ),
    "call_wait": Wait(
        lambda envs: envs.call_async("add", 2, 3), lambda envs: envs.call_wait(WAIT_S), lambda count: (5,) * ROWS, False
    ),
    "recv": Wait(lambda envs: envs.send(rewards(1)), lambda envs: seen(envs.recv(timeout=WAIT_S)), stepped),
    "recv, raising": Wait(
        lambda envs: envs.send(np.array([9]), [2]),
        lambda envs: raised(lambda: envs.recv(timeout=WAIT_S)),
        "not allowed at {}".format,
    ),
    "recv of a reset": Wait(
        lambda envs: envs.async_reset(seed=1),
        lambda envs: envs.recv(timeout=WAIT_S)[0][:, 0].tolist(),
        lambda count: [0] * ROWS,
        False,
    ),
}
# Those without: asked again, they answer the same.
QUESTIONS: dict[str, Callable[[Envs], Any]] = {
    "call": lambda envs: envs.call("add", 2, 3),
    "call_some": lambda envs: envs.call_some([2, 0], "add", 2, 3),
    "get_attr": lambda envs: envs.get_attr("note"),
    "set_attr": lambda envs: (envs.set_attr("note", list("abc")), envs.get_attr("note", [0, 2])),
    "has_attr": lambda envs: envs.has_attr("note"),
    "attr_is_callable": lambda envs: envs.attr_is_callable("add"),
    "is_wrapped": lambda envs: envs.is_wrapped("no:One"),
    "render": lambda envs: [frame.tolist() for frame in envs.render()],
    "single_reward_space": lambda envs: envs.single_reward_space,
    "observe": lambda envs: [each.tolist() for each in envs.observe()],
}
WHOLE: dict[str, Callable[[Envs], Any]] = {
    "step": lambda envs: envs.step(rewards(1)),
    "reset": lambda envs: envs.reset(),
    "masked reset": lambda envs: envs.reset(options={"reset_mask": np.array([True, True, True])}),
}
SWEEP = pytest.mark.parametrize(
    "stride", [pytest.param(101, id="sample"), pytest.param(1, id="all", marks=pytest.mark.chaos)]
)
QUICK = ("step_wait", "recv", "call_wait")


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralHubs]:
    with several_hubs(tmp_path_factory.mktemp("hubs"), 2, "talking=sims:Talking") as running:
        yield running


def made(hubs: SeveralHubs, name: str) -> Envs:
    scene, _, loss = name.partition(", ")
    options: dict[str, Any] = {"num_workers": 2, "render_mode": "rgb_array"}
    if "recreate" in (scene, loss):
        options["on_hub_loss"] = "recreate"
    if scene == "two hubs":
        options |= {"hub": hubs.addresses("ipc", "tcp"), "split": [1, 2]}
    else:
        options["hub"] = hubs.hubs[0].tcp if scene == "wire" else hubs.hubs[0].ipc
    return envhub.make_vec("talking", ROWS, **options)


@pytest.fixture(
    params=[
        SCENES[0],
        *(pytest.param(each, marks=pytest.mark.long) for each in SCENES[1:3]),
        *(pytest.param(each, marks=pytest.mark.chaos) for each in SCENES[3:]),
    ]
)
def envs(request: pytest.FixtureRequest, hubs: SeveralHubs) -> Iterator[Envs]:
    with closing(made(hubs, request.param)) as envs:
        yield envs


def interrupts(stride: int) -> Iterator[Interrupt]:
    """One at the first point, one ``stride`` further and so on, as long as there are points."""
    at, interrupt = 1, None
    while interrupt is None or interrupt.raised:
        interrupt = Interrupt(at)
        yield interrupt
        at += stride
    print(f"  {at - stride} points")


@SWEEP
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.long) for each in WAITS]
)
def test_wait_that_was_interrupted_returns_its_result_when_it_is_called_again(
    envs: Envs, name: str, stride: int
) -> None:
    wait, tried = WAITS[name], 0
    envs.reset()
    for count, interrupt in enumerate(interrupts(stride), 1):
        wait.begin(envs)
        found = interrupt.during(lambda: wait.wait(envs))
        if found is None:
            tried += 1
            try:
                found = wait.wait(envs)
            except (envhub.EnvHubError, AssertionError) as error:
                raise AssertionError(str(interrupt.where)) from error
        assert found == wait.wanted(count), str(interrupt.where)
    print(f"{name}: {tried} interrupts")
    assert tried


@SWEEP
@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", QUESTIONS)
def test_question_that_was_interrupted_is_answered_when_it_is_asked_again(envs: Envs, name: str, stride: int) -> None:
    ask, tried = QUESTIONS[name], 0
    envs.reset()
    envs.step(rewards(1))
    wanted = ask(envs)
    for interrupt in interrupts(stride):
        if interrupt.during(lambda: ask(envs)) is None:
            tried += 1
        assert ask(envs) == wanted, str(interrupt.where)
    print(f"{name}: {tried} interrupts")


@SWEEP
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WHOLE)
def test_call_that_begins_and_waits_is_done_by_all_envs_or_by_none_and_leaves_nothing_to_wait_for(
    envs: Envs, name: str, stride: int
) -> None:
    tried = 0
    envs.reset()
    for interrupt in interrupts(stride):
        before = envs.step(rewards(1))[0][0, 0]
        found = interrupt.during(lambda: WHOLE[name](envs))
        if interrupt.raised and found is None:
            tried += 1
            for wait in (envs.step_wait, envs.reset_wait, envs.call_wait):
                with pytest.raises(envhub.NothingPending):
                    wait(WAIT_S)
        (count,) = {*envs.get_attr("count")}
        assert count in ((before, before + 1) if name == "step" else (before, 0)), str(interrupt.where)
        assert envs.step(rewards(1))[0][:, 0].tolist() == [count + 1] * ROWS, str(interrupt.where)
    print(f"{name}: {tried} interrupts")


def lost(wait: Callable[[], Any]) -> bool:
    """Whether the wait raises that the session has ended; it must."""
    with pytest.raises(envhub.SessionLost):
        wait()
    return True


@SWEEP
@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize("scene", SCENES[:3])
def test_end_of_the_session_in_recv_is_raised_until_the_caller_has_it(
    hubs: SeveralHubs, scene: str, stride: int
) -> None:
    tried = 0
    for interrupt in interrupts(stride):
        with closing(made(hubs, scene)) as envs:
            envs.reset()
            envs.send(rewards(1))
            hubs.end_sessions(scene == "two hubs")
            if interrupt.during(lambda: lost(lambda: envs.recv(timeout=WAIT_S))) is None:
                tried += 1
                assert lost(lambda: envs.recv(timeout=WAIT_S)), str(interrupt.where)
            if scene == "two hubs":  # the other one's rows are had as ever
                assert envs.recv(timeout=WAIT_S)[5].tolist() == [0]
            with pytest.raises((envhub.NothingPending, envhub.SessionLost)):
                envs.recv(timeout=WAIT_S)
            assert lost(envs.reset)  # and no SessionBusy
    print(f"{scene}: {tried} interrupts")
    assert tried


@SWEEP
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", SCENES[3:])
@pytest.mark.parametrize("name", ["recv", "step_wait"])
def test_loss_in_an_interrupted_wait_is_a_truncation_of_each_lost_row_once(
    hubs: SeveralHubs, name: str, scene: str, stride: int
) -> None:
    tried, is_lost = 0, [scene == "recreate", True, True]
    for interrupt in interrupts(stride):
        with closing(made(hubs, scene)) as envs:
            envs.reset()
            (envs.send if name == "recv" else envs.step_async)(rewards(1))
            hubs.end_sessions(scene != "recreate")
            wait = partial(getattr(envs, name), timeout=WAIT_S)
            found = interrupt.during(wait)
            if found is None:
                tried += 1
                found = wait()
            assert found[3].tolist() == is_lost, str(interrupt.where)
            for count in (1, 2):
                observations, _, _, truncations, _ = envs.step(rewards(1))
                assert not truncations.any(), str(interrupt.where)
                wanted = [count - 1 if lost else count + 1 for lost in is_lost]
                assert observations[:, 0].tolist() == wanted, str(interrupt.where)
    print(f"{name}, {scene}: {tried} interrupts")
    assert tried
