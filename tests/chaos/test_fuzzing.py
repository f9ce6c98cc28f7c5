"""A million frames of attackers, from a seed: the hub lives, does not grow, and honest chains beside are unbroken."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.attackers import Attack, FrameAttack, MemoryAttack, WorkerAttack
from chaos.mutations import Mutator
from chaos.trainer import Trainer
from hubs import ServedHub, lives, serve, wait_until
from lying_hub import NUM_ENVS, LyingHub

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Done, Op, pack_rows
from envhub.protocol.prelude import Prelude
from envhub.values import codec

TESTS = Path(__file__).parent.parent
OFFERED = ["chain=chaos.chain_env:ChainEnv", "babbling=chaos.babbling_env:BabblingEnv"]
# Changed messages make sessions, too, whose envs may want any memory.
LIMITS = ["--lease", "1", "--max-envs", "64", "--worker-memory", str(1 << 29)]
GROWN_MAX = 64 << 20
END_S = 60.0
PATIENCE_S = 20.0
PAUSE_S = 0.002


class Fuzzing:
    """A hub with honest trainers on both lanes, and its attackers.

    Attributes:
        peak: the most memory that the hub was seen with.
    """

    def __init__(self, hub: ServedHub, seed: int) -> None:
        self.hub, self.seed = hub, seed
        # With pauses, since the attackers are threads of this process, too.
        self.trainers = [Trainer(seed, address, spin_us=0, pause_s=PAUSE_S) for address in (hub.tcp, hub.ipc)]
        self.sent: Counter[str] = Counter()
        self.peak = 0
        for trainer in self.trainers:
            trainer.start()
        assert wait_until(lambda: all(trainer.tally.acknowledged for trainer in self.trainers)), self.told()

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.hub.process.pid).memory_info().rss)

    def told(self) -> str:
        tallies = [(trainer.tally, trainer.endings) for trainer in self.trainers]
        return f"seed {self.seed}: {dict(self.sent)}, honest: {tallies}; the hub says:\n{self.hub.log[-3000:]}"

    def attack(self, frames: int, seed: int) -> None:
        """Send so many frames, over both kinds of addresses; meanwhile attack by memory and by workers."""
        hub = self.hub
        sending: list[Attack] = [FrameAttack(seed, hub.tcp, frames // 2), FrameAttack(seed + 1, hub.ipc, frames // 2)]
        attacks = [*sending, MemoryAttack(seed + 2, hub.ipc), WorkerAttack(seed + 3, hub.tcp)]
        for each in attacks:
            each.start()
        while any(each.is_alive() for each in sending) and hub.process.poll() is None:
            sending[0].join(0.2)
            self.peak = max(self.peak, self.rss)
        for each in attacks:
            each.stopped.set()
            each.join(END_S)
            self.sent += each.sent
            assert not each.is_alive() and not each.problem, f"{type(each).__name__}: {each.problem}; {self.told()}"

    def check(self) -> None:
        """See that every chain is whole, that the hub answers, and that nothing is left once it ends."""
        hub = self.hub
        for trainer in self.trainers:
            trainer.stopped.set()
            trainer.join(END_S)
            assert not trainer.is_alive() and trainer.tally.acknowledged, self.told()
            assert not trainer.tally.wrong and not trainer.endings and not trainer.tally.truncations, self.told()
        with envhub.connect(hub.tcp) as client:
            assert client.health()["status"] == "ok"
            assert wait_until(lambda: client.stats()["sessions"] == 0, END_S), client.sessions()
        assert wait_until(lambda: not hub.workers(), END_S), self.told()
        assert "memfd:" not in Path(f"/proc/{hub.process.pid}/maps").read_text()
        below = psutil.Process(hub.process.pid).children(recursive=True)
        assert hub.stop() == 0, self.told()
        assert wait_until(lambda: not any(map(lives, below))), self.told()
        assert "internal_error" not in hub.log, self.told()


def fuzz(folder: Path, seed: int, warm_up: int, frames: int) -> None:
    with serve(folder, *OFFERED, *LIMITS, cwd=TESTS) as hub:
        fuzzing = Fuzzing(hub, seed)
        fuzzing.attack(warm_up, seed * 1000)
        before = fuzzing.rss
        fuzzing.attack(frames, seed * 1000 + 500)
        grown = fuzzing.rss - before
        with envhub.connect(hub.tcp) as client:
            malformed = client.stats()["malformed"]
        fuzzing.check()
    print(
        f"seed {seed}: {dict(fuzzing.sent)}; memory of the hub {grown / 2**20:+.1f} MiB, "
        f"at most {(fuzzing.peak - before) / 2**20:+.1f}"
    )
    assert grown <= GROWN_MAX, f"seed {seed}: the hub has grown by {grown / 2**20:.1f} MiB"
    assert fuzzing.sent["frames"] >= frames and malformed > 0
    assert fuzzing.sent["arenas"] and fuzzing.sent["babbles"]


class HostileHub(LyingHub):
    """Changes one of its replies after the other: in turn that to each kind of request."""

    def __init__(self, seed: int) -> None:
        super().__init__({Op.CALL: (Done(), [pack_rows([(row, codec.encode(row)) for row in range(NUM_ENVS)])])})
        self.mutator = Mutator(seed)
        self.changed = Op.HELLO

    def _send(self, peer: bytes, op: int, asked: Prelude, message: Any, frames: Sequence[bytes] = ()) -> None:
        head = Prelude(op, 1, asked.token, asked.seq).pack() + messages.pack(message)
        built = [head, *frames]
        if asked.op == self.changed:
            built = self.mutator.reply(message, built)
        self._socket.send_multipart([peer, *built])


def trained(address: str) -> None:
    """A short life of a client."""
    with contextlib.closing(envhub.make_vec("counter", NUM_ENVS, hub=address)) as envs:
        envs.reset()
        envs.step([0, 0])
        envs.call("n")


@pytest.mark.long
def test_thousands_of_frames_harm_nobody(tmp_path: Path) -> None:
    fuzz(tmp_path, seed=15, warm_up=500, frames=3000)


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_million_frames_harm_nobody(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    fuzz(tmp_path, seed=request.config.getoption("--seed"), warm_up=50_000, frames=10**6)


def ended(seed: int, sessions: int) -> Counter[str]:
    """How clients of a hostile hub end; none hangs, grows or raises what is no error of a hub's."""
    endings: Counter[str] = Counter()
    with HostileHub(seed) as hub:
        before = psutil.Process().memory_info().rss
        for number in range(sessions):
            hub.changed = [Op.HELLO, Op.MAKE, Op.RESET, Op.STEP, Op.CALL, Op.CLOSE][number % 6]
            begun_s = time.monotonic()
            try:
                trained(hub.address)
                endings["well"] += 1
            except envhub.EnvHubError as error:
                endings[type(error).__name__] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, session {number}, {hub.changed.name}") from error
            assert time.monotonic() - begun_s < PATIENCE_S, f"seed {seed}, session {number}, {hub.changed.name}"
        grown = psutil.Process().memory_info().rss - before
    print(f"seed {seed}: {sessions} sessions of a hostile hub: {dict(endings)}, memory {grown / 2**20:+.1f} MiB")
    assert grown <= GROWN_MAX, f"seed {seed}: the client has grown by {grown / 2**20:.1f} MiB"
    return endings


def test_changed_replies_of_a_hub_are_errors_of_its_client() -> None:
    endings = ended(15, 60)
    assert endings["RemoteProtocolError"]


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_ten_thousand_changed_replies_of_a_hub_are_errors_of_its_client(request: pytest.FixtureRequest) -> None:
    ended(request.config.getoption("--seed"), 10_000)
