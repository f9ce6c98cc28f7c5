"""Tries the env of a worker: makes, resets and steps it once, or finds all that ``envhub validate`` says of it."""

from __future__ import annotations

import importlib
import os
import re
import threading
import time
import warnings
from typing import Any

import numpy as np

from envhub.errors import shortened
from envhub.values import codec
from envhub.values.gym_api import api
from envhub_server.ipc import control
from envhub_server.ipc.process_marks import listed_children, private_bytes
from envhub_server.worker.builder import Builder
from envhub_server.worker.context import WorkerContext
from envhub_server.worker.copyable import pause_openmp, threads_left, what_cannot_be_copied
from envhub_server.worker.env_batch import EnvBatch
from envhub_server.worker.row import EnvRunner
from envhub_server.worker.shared_process import changed_since, is_cheap, may_share_process, shared_state

SEED = 1
STEPS_MAX, STEPS_S = 200, 5.0  # of a run, which begins no further step after these seconds
TEXT_CHARS_MAX = 300
_COLOR = re.compile(r"\x1b\[\d+m(WARN: )?")


class EnvTrial:
    """Tries for one worker, which ends then."""

    def __init__(self, context: WorkerContext, builder: Builder) -> None:
        self._channel, self._envs, self._host, self._reports, _ = context
        self._builder = builder

    def run(self, wanted: control.Try) -> bool:
        self._own = {*map(int, os.listdir("/proc/self/fd"))}
        before = _tasks(), private_bytes(), time.monotonic()
        if self._builder.build(wanted.build):
            try:
                facts = self._thorough(*before) if wanted.thorough else self._once()
                self._channel.send(control.Tried(facts))
            except BaseException as error:
                self._reports.send(error, 0, "env_raised")
        return False

    def _at(self, what: str) -> None:
        """Tell the hub, which names it if the env ends the process or does not return."""
        self._channel.send(control.Trying(what))

    def _once(self) -> dict[str, Any]:
        (group,) = self._envs.groups
        if isinstance(group, EnvBatch):
            self._at("reset")
            group.env.reset([None], 1, None, False)
            actions = api.vector.utils.batch_space(group.env.action_space, 1).sample()
            self._at("step")
            group.env.step(actions)
        else:
            self._run(group.env, [group.env.action_space.sample()])
        return {}

    def _thorough(self, tasks: int, nbytes: int, began_s: float) -> dict[str, Any]:
        (group,) = self._envs.groups
        if isinstance(group, EnvBatch):
            raise TypeError("it is a vector env, and what is validated is a single env")
        env, shared = group.env, shared_state()
        facts: dict[str, Any] = {"made_s": time.monotonic() - began_s, "memory_bytes": private_bytes() - nbytes}
        env.action_space.seed(SEED)
        actions = [env.action_space.sample() for _ in range(STEPS_MAX)]
        first, costs = self._run(env, actions)
        facts.update(costs, threads=_tasks() - tasks, processes=_children())
        facts.update(shared=changed_since(shared), may_share=may_share_process(env, EnvRunner), cheap=is_cheap(env))
        facts["not_copied"] = what_cannot_be_copied(self._own)
        pause_openmp()
        self._host.zygote.fork_nothing()
        facts["not_copied"] += [f"the thread {name}" for name in threads_left()]
        self._at("another env of its process")
        other, nbytes, facts["second_error"] = env, private_bytes(), ""
        try:
            other = self._builder.another()
        except Exception as error:
            facts["second_error"] = self._reports.one_line(error)
        second, _ = self._run(other, actions[: facts["steps"]], float("inf"))
        differences = (number for number, pair in enumerate(zip(first, second)) if pair[0] != pair[1])
        facts.update(further_bytes=private_bytes() - nbytes, differs=next(differences, None))
        self._at("Gymnasium's checker")
        facts["refused"], facts["remarks"] = _checked(other.unwrapped)
        self._at("close")
        for each in {id(env): env, id(other): other}.values():
            each.close()
        left = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        counts = {"threads of a library": _tasks() - tasks - len(left), "processes": _children()}
        return {**facts, "left": left + [f"{count} {what}" for what, count in counts.items() if count > 0]}

    def _run(self, env: Any, actions: list[Any], limit_s: float = STEPS_S) -> tuple[list[bytes], dict[str, Any]]:
        """Reset and step the env; return its results, encoded and without infos, and the costs as medians."""
        # On a busy machine other processes delay some of the steps, and change no median.
        runner, results = EnvRunner(env), []
        resets_ns: list[int] = []
        steps: list[tuple[int, int]] = []
        until_s, is_over = time.monotonic() + limit_s, True
        for action in actions:
            if is_over:
                self._at("reset")
                began_ns = time.perf_counter_ns()
                observation, _ = runner.reset(None if resets_ns else SEED, None)
                resets_ns.append(time.perf_counter_ns() - began_ns)
                results.append(codec.encode([observation], codec.as_repr))
                self._at("step")
            began = time.perf_counter_ns(), time.process_time_ns()
            observation, reward, terminated, truncated, _ = runner.step(action)
            steps.append((time.perf_counter_ns() - began[0], time.process_time_ns() - began[1]))
            is_over = bool(terminated or truncated)
            results.append(codec.encode([observation, reward, bool(terminated), bool(truncated)], codec.as_repr))
            if time.monotonic() > until_s:
                break
        step_ns, cpu_ns = np.median(steps, axis=0).tolist()
        costs = {"reset_ms": float(np.median(resets_ns)), "step_ms": step_ns, "cpu_ms": cpu_ns}
        return results, {"steps": len(steps), **{name: each / 1e6 for name, each in costs.items()}}


def _children() -> int:
    return len(listed_children(os.getpid()) or ())


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _checked(env: Any) -> tuple[str, list[str]]:
    """The reason why Gymnasium's checker refuses the env, empty if it does not, and its remarks."""
    if not isinstance(env, api.Env):
        return "", [f"it is for envs of {api.__name__}; EnvHub adapts this {type(env).__qualname__}"]
    checker: Any = importlib.import_module(f"{api.__name__}.utils.env_checker")
    refused = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checker.check_env(env, skip_render_check=True)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
    texts = dict.fromkeys(_COLOR.sub("", str(each.message)) for each in caught)
    return shortened(refused, TEXT_CHARS_MAX), [shortened(text, TEXT_CHARS_MAX) for text in texts]
