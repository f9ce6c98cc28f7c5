"""The texts that users read at typical failures, each of a real call, are those in ``texts.txt``.

``pytest -n 0 --write-texts tests/integration/test_texts.py`` writes the file.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sims
from hubs import ServedHub, free_port, serve, stopped
from new_keys import address_of, admitted, keys_in

import envhub

FILE = Path(__file__).with_name("texts.txt")
HEAD = """# Texts of typical failures

Written by `pytest -n 0 --write-texts tests/integration/test_texts.py`. Words in capitals differ between runs.
"""
# What differs between runs, and the frames of tracebacks, which differ between versions of Python.
VARIES = {
    r"(?m)^ .*\n?": "",
    r"127\.0\.0\.1:\d+": "127.0.0.1:PORT",
    r"session [0-9a-f]{8} was taken over by user \w+": "session NAME was taken over by USER",
    r"ipc:///[\w./-]+": "ipc:///FOLDER/hub.sock",
    r"-[0-9a-f]{16}-worker": "-SESSION-worker",
    r"0x[0-9a-f]+": "0xADDRESS",
    r"\b\d+(\.\d+)? s\b": "SECONDS s",
}


@dataclass
class Scene:
    """What the calls need."""

    hub: ServedHub
    keyed: str  # the address of a hub with keys, and the key of a client
    public: str  # the same without a key
    removed: str  # the same with a key that was removed

    def made(self, name: str = "naughty", num_envs: int = 2, **options: Any) -> envhub.HubVectorEnv:
        return envhub.make_vec(name, num_envs, hub=self.hub.tcp, **options)


Case = Callable[[Scene], object]


def stepped(action: int, **options: Any) -> Case:
    """Step an env that fails at this action."""

    def case(scene: Scene) -> object:
        with closing(scene.made(num_workers=2, **options)) as envs:
            envs.reset(seed=1)
            for each in (0, action, action):  # a first step may take as long as the making of an env
                result = envs.step([0, each])
            return result

    return case


def made(*arguments: Any, **options: Any) -> Case:
    return lambda scene: envhub.make_vec(*arguments, **options)


def used(use: Callable[[envhub.HubVectorEnv], object]) -> Case:
    """Use two envs that were reset."""

    def case(scene: Scene) -> object:
        with closing(scene.made()) as envs:
            envs.reset(seed=1)
            return use(envs)

    return case


def stepped_twice(envs: envhub.HubVectorEnv) -> object:
    envs.step_async([0, 0])
    return envs.step_async([0, 0])


def timed_out(envs: envhub.HubVectorEnv) -> object:
    with stopped(*{int(pid) for pid in envs.call("pid")}):
        envs.step_async([0, 0])
        return envs.step_wait(timeout=0.1)


def timed_out_of_three_hubs(scene: Scene) -> object:
    with contextlib.ExitStack() as stack:
        hubs = [scene.hub.tcp]
        for number in range(2):
            folder = Path(scene.hub.ipc.removeprefix("ipc://")).with_name(f"another-{number}")
            folder.mkdir()
            hubs.append(stack.enter_context(serve(folder, "naughty=sims:naughty")).tcp)
        envs = stack.enter_context(closing(envhub.make_vec("naughty", 3, hub=hubs, split=[1, 1, 1], lane="wire")))
        first, _, last = envs.call("pid")
        with stopped(int(first), int(last)):
            envs.step_async([0, 0, 0])
            for _ in range(60):
                try:
                    return envs.step_wait(timeout=0.5)
                except envhub.HubTimeout as error:
                    if hubs[1] not in str(error):  # else this one, too, had not the time on a busy machine
                        raise
            return "the second hub never answered"


def closed(envs: envhub.HubVectorEnv) -> object:
    envs.close()
    return envs.step([0, 0])


def taken_over(scene: Scene) -> object:
    with envhub.connect(scene.hub.tcp) as client, closing(scene.made()) as envs:
        envs.reset()
        with closing(client.attach(envs.token)):
            return envs.step([0, 0])


def attached(scene: Scene, token: str) -> object:
    with envhub.connect(scene.hub.tcp) as client:
        return client.attach(token)


def ended(scene: Scene) -> object:
    envs = scene.made()
    envs.close()
    return attached(scene, envs.token)


def hub_killed(scene: Scene) -> object:
    folder = Path(scene.hub.ipc.removeprefix("ipc://")).with_name("killed")
    folder.mkdir()
    with serve(folder, "CartPole-v1") as hub, closing(envhub.make_vec("CartPole-v1", hub=hub.ipc)) as envs:
        envs.reset()
        hub.stop(signal.SIGKILL)
        return envs.step([0])


def nowhere(scene: Scene) -> object:
    return envhub.connect(f"tcp://127.0.0.1:{free_port()}", timeout=0.5)


CASES: dict[str, Case] = {
    "no hub listens": nowhere,
    "what is given is no address": lambda scene: envhub.connect("localhost:5555"),
    "a hub with keys, and no key": lambda scene: envhub.connect(scene.public),
    "a hub with keys, and a key that was removed": lambda scene: envhub.connect(scene.removed),
    "a key without the right to send factories": lambda scene: envhub.make_vec(sims.counter, hub=scene.keyed),
    "a hub is killed": hub_killed,
    "a hub offers no such env": lambda scene: scene.made("Naughty"),
    "a misspelt keyword": made("CartPole-v1", num_worker=3),
    "an argument that the env does not take": lambda scene: scene.made("CartPole-v1", size=3),
    "no env": made("CartPole-v1", num_envs=0),
    "no factory": made([]),
    "an env in place of a factory": made(sims.Counter()),
    "a lane that does not exist": made("CartPole-v1", lane="shared"),
    "an autoreset mode that does not exist": made("CartPole-v1", autoreset_mode="foo"),
    "a policy that does not exist": made("CartPole-v1", on_crash="ignore"),
    "a number of workers that cannot be": made("CartPole-v1", num_workers=-1),
    "a time that cannot be": made("CartPole-v1", step_timeout=-1),
    "envs whose spaces differ": made([sims.Counter, sims.counter, sims.nested]),
    "an env cannot be made": lambda scene: scene.made("never_made"),
    "actions of a wrong shape": used(lambda envs: envs.step([0, 0, 0])),
    "an attribute that no env has": used(lambda envs: envs.get_attr("speed")),
    "a step while another is pending": used(stepped_twice),
    "a wait without a step": used(lambda envs: envs.step_wait()),
    "a step is not finished in time": used(timed_out),
    "a step of some of several hubs is not finished in time": timed_out_of_three_hubs,
    "a use after close": used(closed),
    "an env raises": stepped(1),
    "an env raises an exception of its own": stepped(2),
    "an env crashes, on_crash=raise": stepped(3, on_crash="raise"),
    "an env crashes, restarts_max=0": stepped(3, restarts_max=0),
    "an env hangs, on_timeout=raise": stepped(8, on_timeout="raise", step_timeout=1.0),
    "a session was taken over": taken_over,
    "a session has ended": ended,
    "a token that is none": lambda scene: attached(scene, "abc"),
}


def error_of(name: str, case: Case, scene: Scene) -> Exception:
    try:
        result = case(scene)
    except Exception as error:
        return error
    raise AssertionError(f"{name}: nothing was raised, and {result!r} returned")


def texts(cases: Mapping[str, Case], scene: Scene) -> str:
    """The page: for each case the class of its exception, and its text."""
    page = HEAD
    for name, case in cases.items():
        error = error_of(name, case, scene)
        kind, text = type(error), str(error)
        for pattern, word in VARIES.items():
            text = re.sub(pattern, word, text)
        page += f"\n## {name}\n\n`{kind.__module__}.{kind.__qualname__}`\n\n```text\n{text.strip()}\n```\n"
    return page


@pytest.fixture
def scene(hub: ServedHub, tmp_path: Path) -> Iterator[Scene]:
    keys = keys_in(tmp_path / "keys")
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as locked:
        keyed, removed = (address_of(admitted(keys, name), locked.tcp) for name in ("alice", "eve"))
        keys.remove("eve")
        yield Scene(hub, keyed, locked.tcp, removed)


@pytest.mark.long
def test_texts_of_failures_are_those_in_the_file(scene: Scene, request: pytest.FixtureRequest) -> None:
    page = texts(CASES, scene)
    if request.config.getoption("--write-texts"):
        FILE.write_text(page)
    kept = FILE.read_text()
    assert page == kept, "\n".join(difflib.unified_diff(kept.splitlines(), page.splitlines(), "kept", "now", n=2))
