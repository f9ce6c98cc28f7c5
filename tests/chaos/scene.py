"""What the nemesis acts on: a served hub, a proxy and a relay before it, and a trainer on every lane."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from chaos.chaos_proxy import FAIR, ChaosProxy, Weather, proxy
from chaos.checker import Tally
from chaos.intruder import CONNECTIONS_MAX, Unanswered, meddle
from chaos.journal import Journal
from chaos.nemesis import EMBEDDED, IPC, RELAY, TCP, Act
from chaos.relay import Mischief, Relay, relay
from chaos.trainer import Task, arguments, heard
from envhub_server.network.key_folder import KeyFolder
from envhub_server.network.rights import RIGHTS
from hubs import ServedHub, lives, serve, wait_until, worker_processes
from new_keys import admitted

import envhub
from envhub.transport.address import parse

TESTS = Path(__file__).parent.parent
FLOOD_PACE_S = 0.002  # within one turn of its loop the hub has to notice that its descriptors run out
FLOOD_CONNECTIONS, LEFT_DESCRIPTORS = 200, 100
HOARD_ENVS, HOARD_ELEMENTS = 64, 250_000  # a quarter of a gigabyte
HOARD_SESSIONS_MAX = 12
LEASE_S = 4.15  # no multiple of the time between two looks of the hub at whether its clients are there
SILENCE_S = 3.0  # of a client's connection, before its lease runs
LEFT_S = 0.12  # of a lease, when a client comes back late
EXPIRED_S = SILENCE_S + LEASE_S + 3.0  # by then a session without a client has ended
LOOK_S = 1.0  # between two looks at what a hub holds
MANY = {"sessions_max": 64, "connections_max": 4096, "makes_per_minute_max": 10_000}
INTRUDERS = {"sessions_max": 1, "connections_max": CONNECTIONS_MAX, "makes_per_minute_max": 10_000}
START_S = 60.0
GONE_S = 10.0  # one second is promised; the rest is for a machine on which everything happens at once


class _Run:
    """One process of a trainer, and the last line that it printed."""

    def __init__(self, task: Task) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(arguments(task), stdin=pipe, stdout=pipe, text=True, cwd=TESTS)
        self.line = ""
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: Any) -> None:
        with lines:
            for line in lines:
                if line.endswith("}\n"):
                    self.line = line

    def heard(self) -> tuple[Tally, Counter[str]]:
        """What it saw, and how its sessions ended, as far as it has said so."""
        return heard(self.line) if self.line else (Tally(), Counter())

    def await_readiness(self) -> None:
        """Wait until it waits for ``go``."""
        assert wait_until(lambda: bool(self.line) or self.process.poll() is not None, START_S), "no trainer started"

    def go(self) -> None:
        """Have it begin, if its task is to wait for that."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def kill(self) -> None:
        """Kill it; nothing that it has started outlives it for long."""
        below = _below(self.process.pid)
        self.process.kill()
        self.process.wait()
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed trainer: {below}"

    def stop(self) -> None:
        """Have it end, and hear its last words."""
        self.process.terminate()
        try:
            self.process.wait(90)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.join()

    def join(self) -> None:
        """Wait until all that it has printed is read, once it has ended."""
        self._reader.join(10)
        self.go()


class TrainerProcess:
    """A trainer in a process of its own, and the next one after it was killed, or when that takes its session over.

    Attributes:
        kills: how many of them were killed.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._past, self._past_endings = Tally(), Counter[str]()
        self.kills = 0
        self._run = _Run(task)

    @property
    def process(self) -> subprocess.Popen[str]:
        """The one that trains now."""
        return self._run.process

    @property
    def tally(self) -> Tally:
        """What all of them saw."""
        total = Tally()
        total.add(self._past)
        total.add(self._run.heard()[0])
        return total

    @property
    def endings(self) -> Counter[str]:
        """How their sessions ended."""
        return self._past_endings + self._run.heard()[1]

    def token(self) -> bytes | None:
        """The token of its session, as it has noted it; None if it has made none."""
        entry = Journal(Path(self._task.journal)).read() if self._task.journal else None
        return None if entry is None else bytes.fromhex(entry[0])

    def kill(self) -> None:
        """Kill it, and have another one take its session over, or begin anew."""
        self._replace(_Run.kill)
        self.kills += 1

    def abandon(self) -> None:
        """Kill it, and have another one begin anew that knows nothing of its session: nobody comes back to that."""
        self._replace(lambda run: (run.kill(), Path(self._task.journal).unlink(missing_ok=True)))
        self.kills += 1
        self._await_steps()

    def take_over(self) -> None:
        """Have another one take its session over while it is stopped; going on, it must find that out, and end."""
        old = self._replace(lambda run: run.process.send_signal(signal.SIGSTOP), bury=False)
        try:
            self._await_steps()
        finally:
            old.process.send_signal(signal.SIGCONT)
            old.stop()
            self._bury(old)

    def _replace(self, end: Callable[[_Run], object], bury: bool = True) -> _Run:
        """Have another one go on as soon as this has come to its end; it is started before, since that takes longer.

        Returns the one that ended.
        """
        old, new = self._run, _Run(replace(self._task, waits=True))
        new.await_readiness()
        end(old)
        if bury:
            self._bury(old)
        self._run = new
        new.go()
        return old

    def _await_steps(self) -> None:
        made = wait_until(lambda: bool(self._run.heard()[0].batches) or self._run.process.poll() is not None, START_S)
        assert made, f"the next trainer made no step within {START_S:g} s"

    def stop(self) -> None:
        """Have it end, and hear its last words."""
        self._run.stop()

    def end(self) -> None:
        """Kill it, and have none follow."""
        self._run.kill()
        self._run.join()

    def _bury(self, run: _Run) -> None:
        run.join()
        tally, endings = run.heard()
        self._past.add(tally)
        self._past_endings += endings


class Scene:
    """Everything that is acted on, and the acts.

    Attributes:
        done: how often what was done.
        problems: what the acts found.
    """

    def __init__(self, stack: contextlib.ExitStack, folder: Path, seed: int, tasks: dict[str, Task]) -> None:
        self._stack = stack
        self._folder = folder
        self.done: Counter[str] = Counter()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hoarding: threading.Thread | None = None
        self._ending = threading.Event()
        self.problems: list[str] = []
        self._hub_stack = stack.enter_context(contextlib.ExitStack())
        self._keys = KeyFolder(folder / "keys")
        self._keys.make_secret()
        tokens = {lane: admitted(self._keys, lane, **MANY) for lane in (TCP, RELAY)}
        self._intruders = {right: admitted(self._keys, f"intruder-{right}", right, **INTRUDERS) for right in RIGHTS}
        self._looked_s = 0.0
        self.hub = self._serve(None)
        self._proxy: ChaosProxy = stack.enter_context(proxy(self.hub.tcp, seed))
        keys = parse(f"envhub://{tokens[RELAY]}@{self.hub.tcp.removeprefix('tcp://')}").keys
        self._relay: Relay = stack.enter_context(relay(self.hub.tcp, seed, keys))
        by_proxy = f"envhub://{tokens[TCP]}@{self._proxy.address.removeprefix('tcp://')}"
        addresses = {EMBEDDED: None, IPC: self.hub.ipc, TCP: by_proxy, RELAY: self._relay.address}
        self.trainers = {
            lane: TrainerProcess(
                replace(
                    task, hub=addresses[lane], journal=self._journal(lane), lease_s=0.0 if lane == EMBEDDED else LEASE_S
                )
            )
            for lane, task in tasks.items()
        }

    def _journal(self, lane: str) -> str:
        return "" if lane == EMBEDDED else str(self._folder / f"journal-{lane}")

    def _serve(self, binds: Sequence[str] | None) -> ServedHub:
        offered = ("chain=chaos.chain_env:ChainEnv", "--lease", str(LEASE_S), "--keys", str(self._keys.path))
        return self._hub_stack.enter_context(serve(self._folder, *offered, binds=binds, cwd=TESTS))

    def await_trainers(self) -> None:
        """See that all of them are on their way."""
        under_way = wait_until(lambda: all(trainer.tally.batches for trainer in self.trainers.values()), START_S)
        assert under_way, f"a trainer did not start within {START_S:g} s; the hub says:\n{self.hub.log[-4000:]}"

    def check(self) -> None:
        """See that nobody has ended who was not told to."""
        for lane, trainer in self.trainers.items():
            assert trainer.process.poll() is None or trainer.tally.wrong, f"the trainer on {lane} has ended"
        assert self.hub.process.poll() is None, f"the hub has ended:\n{self.hub.log[-4000:]}"
        if not self._undo and time.monotonic() > self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            found = self._unknown_workers
            if found() and not wait_until(lambda: not found(), GONE_S):
                self.problems.append(f"workers of no session: {found()}")
        assert not self.problems, self.problems

    def _unknown_workers(self) -> set[int]:
        """The workers below the hub of which it knows no session."""
        below = {worker.pid for worker in self.hub.workers()}
        with envhub.connect(self.hub.ipc) as hub:
            return below - {pid for session in hub.sessions() for pid in session["workers"]}

    def _await_end_of_sessions(self) -> None:
        """See that the hub ends all sessions and workers once no client is left, and holds no memory of them."""

        def left() -> list[object]:
            with envhub.connect(self.hub.ipc) as hub:
                found = hub.sessions(), hub.stats()["arena_bytes"], [worker.pid for worker in self.hub.workers()]
            return [each for each in found if each]

        if not wait_until(lambda: not left(), EXPIRED_S):
            self.problems.append(f"sessions, bytes or workers left of clients that have gone: {left()}")

    # --- acts ---------------------------------------------------------------------------------------------------------

    def act(self, act: Act) -> None:
        """Do it; where there is nobody to do it to, nothing."""
        if getattr(self, "_" + act.what.replace(" ", "_").replace("-", "_"))(act) is not False:
            self.done[act.what] += 1

    def pass_time(self, until_s: float) -> None:
        """Let time pass, and undo what was done for a time that is over."""
        while (now_s := time.monotonic()) < until_s:
            next_s = self._undo[0][0] if self._undo else until_s
            time.sleep(max(0.0, min(until_s, next_s) - now_s))
            self.undo(time.monotonic())

    def undo(self, until_s: float) -> None:
        """Undo what was to last until then at most."""
        while self._undo and self._undo[0][0] <= until_s:
            heapq.heappop(self._undo)[2]()

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (time.monotonic() + seconds, next(self._order), undo))

    def _workers(self, lane: str) -> list[psutil.Process]:
        parent = self.trainers[EMBEDDED].process.pid if lane == EMBEDDED else self.hub.process.pid
        return sorted(worker_processes(parent), key=lambda worker: worker.pid)

    def _kill_worker(self, act: Act) -> bool | None:
        return self._signal_worker(act, signal.SIGKILL)

    def _stop_worker(self, act: Act) -> bool | None:
        return self._signal_worker(act, signal.SIGSTOP)

    def _signal_worker(self, act: Act, number: int) -> bool | None:
        workers = self._workers(act.lane)
        if not workers:
            return False
        self._signal(workers[act.pick % len(workers)], number, act.seconds)
        return None

    def _signal(self, process: psutil.Process, number: int, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if number == signal.SIGSTOP:
            self._later(seconds, lambda: self._signal(process, signal.SIGCONT, 0))

    def _kill_trainer(self, act: Act) -> None:
        self.undo(float("inf"))  # its private hub may be stopped, and could not notice
        self.trainers[act.lane].kill()

    def _take_over(self, act: Act) -> None:
        self.undo(float("inf"))  # who takes over waits for the hub and its workers
        self.trainers[act.lane].take_over()

    def _abandon(self, act: Act) -> None:
        self.undo(float("inf"))
        self.trainers[act.lane].abandon()

    def _return_late(self, act: Act) -> bool | None:
        """Have a client be silent until its lease has nearly run out, and go on by a step."""
        self.undo(float("inf"))
        token = self.trainers[RELAY].token()
        if token is None:
            return False

        def leased() -> bool:
            return any(each["leased"] and each["session"] == token.hex()[:8] for each in hub.sessions())

        with envhub.connect(self.hub.ipc) as hub, self._relay.hold():
            if not wait_until(leased, SILENCE_S + GONE_S):
                return False
            time.sleep(LEASE_S - LEFT_S)
        return None

    def _meddle(self, act: Act) -> bool | None:
        """Try all that is forbidden."""
        self.undo(float("inf"))
        place = self.hub.tcp.removeprefix("tcp://")
        addresses = {right: f"envhub://{key}@{place}" for right, key in self._intruders.items()}
        try:
            self.problems += meddle(addresses, self._tokens)
        except Unanswered as error:
            self.problems.append(f"of an intruder: {error}")
        return None

    def _tokens(self) -> list[bytes]:
        """The tokens of the trainers' sessions."""
        tokens = [trainer.token() for trainer in self.trainers.values()]
        return [token for token in tokens if token is not None]

    def _stop_trainer(self, act: Act) -> None:
        self._signal(psutil.Process(self.trainers[act.lane].process.pid), signal.SIGSTOP, act.seconds)

    def _kill_hub(self, act: Act) -> bool | None:
        if act.lane == EMBEDDED:
            hub = self._private_hub()
            if hub is None:
                return False
            below = _below(hub.pid)
            hub.kill()
            assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed private hub: {below}"
            return None
        below = _below(self.hub.process.pid)
        self.undo(float("inf"))  # a hub that is stopped is killed all the same, but is not to be continued later
        self.hub.stop(signal.SIGKILL)
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of a killed hub: {below}"
        addresses = self.hub.addresses
        self._hub_stack.close()
        time.sleep(act.seconds)
        self.hub = self._serve(addresses)
        return None

    def _stop_hub(self, act: Act) -> bool | None:
        hub = self._private_hub() if act.lane == EMBEDDED else psutil.Process(self.hub.process.pid)
        if hub is None:
            return False
        self._signal(hub, signal.SIGSTOP, act.seconds)
        return None

    def _private_hub(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.trainers[EMBEDDED].process.pid).children():
                if any("envhub_server.private_hub" in part for part in child.cmdline()):
                    return child
        return None

    def _flood(self, act: Act) -> None:
        """Connections that say nothing."""
        connections = []
        host, _, port = self.hub.tcp.removeprefix("tcp://").rpartition(":")
        for number in range(FLOOD_CONNECTIONS):
            time.sleep(FLOOD_PACE_S)
            with contextlib.suppress(OSError):
                connections.append(socket.socket(socket.AF_INET if number % 2 else socket.AF_UNIX))
                connections[-1].settimeout(0.01)  # a hub that is stopped takes none
                connections[-1].connect((host, int(port)) if number % 2 else self.hub.ipc.removeprefix("ipc://"))
        self._later(act.seconds, lambda: [each.close() for each in connections] and None)

    def _starve(self, act: Act) -> None:
        """Leave the hub fewer descriptors than the connections that come then want."""
        hub = psutil.Process(self.hub.process.pid)
        soft, hard = hub.rlimit(psutil.RLIMIT_NOFILE)
        hub.rlimit(psutil.RLIMIT_NOFILE, (hub.num_fds() + LEFT_DESCRIPTORS, hard))

        def feed() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                hub.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))

        self._flood(act)
        self._later(act.seconds, feed)

    def _hoard(self, act: Act) -> bool | None:
        """Make sessions until the hub refuses more memory, which must not be the end of it; meanwhile time passes."""
        if self._hoarding is not None and self._hoarding.is_alive():
            return False
        self._hoarding = threading.Thread(target=self._fill_memory, args=(self.hub,), daemon=True)
        self._hoarding.start()
        return None

    def _fill_memory(self, hub: ServedHub) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(HOARD_SESSIONS_MAX):
                if self._ending.is_set():
                    return
                try:
                    large = {"elements": HOARD_ELEMENTS}
                    envs = envhub.make_vec("chain", HOARD_ENVS, hub=hub.ipc, env_kwargs=large, num_workers=1)
                except (envhub.RequestRefused, envhub.WorkerDied, envhub.HubUnreachable, envhub.SessionLost):
                    return
                stack.callback(envs.close, terminate=True)
            if self.hub is hub:  # else the memory of the one before is free again
                self.problems.append("the hub gave out more memory than it may")

    # --- acts on the network ------------------------------------------------------------------------------------------

    def _cut(self, act: Act) -> None:
        self._proxy.cut()

    def _half_close(self, act: Act) -> None:
        self._proxy.half_close()

    def _truncate(self, act: Act) -> None:
        self._proxy.truncate()

    def _hold(self, act: Act) -> None:
        self._set_weather(Weather(held=True), act.seconds)

    def _lag(self, act: Act) -> None:
        self._set_weather(Weather(latency_s=0.01, jitter_s=0.05), act.seconds)

    def _trickle(self, act: Act) -> None:
        self._set_weather(Weather(piece_bytes=1), act.seconds)

    def _narrow(self, act: Act) -> None:
        self._set_weather(Weather(bytes_per_s=100_000), act.seconds)

    def _set_weather(self, weather: Weather, seconds: float) -> None:
        self._proxy.weather(weather)
        self._later(seconds, lambda: self._proxy.weather(FAIR))

    def _double(self, act: Act) -> None:
        self._set_mischief(Mischief(double=0.3, repeat=0.3), act.seconds)

    def _repeat(self, act: Act) -> None:
        self._set_mischief(Mischief(repeat=0.5, recall=0.2), act.seconds)

    def _delay(self, act: Act) -> None:
        self._set_mischief(Mischief(delay=0.3, double=0.1), act.seconds)

    def _drop(self, act: Act) -> None:
        self._set_mischief(Mischief(drop=0.05, double=0.1, delay=0.1), act.seconds)

    def _set_mischief(self, mischief: Mischief, seconds: float) -> None:
        self._relay.mischief = mischief

        def end() -> None:
            self._relay.mischief = Mischief()

        self._later(seconds, end)

    # --- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Undo everything, let the trainers end, and see that nothing is left."""
        self.undo(float("inf"))
        if self._hoarding is not None:
            self._ending.set()
            self._hoarding.join(60)
        assert not self.problems, self.problems
        killed = next((lane for lane in (IPC, TCP, RELAY) if lane in self.trainers), None)
        for lane, trainer in self.trainers.items():
            if lane == killed:
                trainer.end()  # nobody comes back to its session, whose lease runs out
            else:
                trainer.stop()
        self._await_end_of_sessions()
        assert not self.problems, self.problems
        below = _below(self.hub.process.pid)
        assert self.hub.stop() == 0, f"the hub did not end well:\n{self.hub.log[-4000:]}"
        assert wait_until(lambda: not any(map(lives, below)), GONE_S), f"left of the hub: {below}"

    def relayed(self) -> Counter[str]:
        """What the relay did to messages."""
        return self._relay.done


def _below(pid: int) -> list[psutil.Process]:
    """The processes below one, and itself."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def scene(folder: Path, seed: int, tasks: dict[str, Task]) -> Iterator[Scene]:
    """A scene, for the block; afterwards nothing of it is left, however the block ended."""
    with contextlib.ExitStack() as stack:
        found = Scene(stack, folder, seed, tasks)
        try:
            yield found
        finally:
            for trainer in found.trainers.values():
                for process in _below(trainer.process.pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                trainer.process.wait()
            if found.hub.process.poll() is None:
                os.kill(found.hub.process.pid, signal.SIGCONT)
