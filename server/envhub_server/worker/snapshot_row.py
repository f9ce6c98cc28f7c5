"""A row whose env may be copied: it keeps what its next result needs, and puts that back in a restored process.

It also keeps what its env was asked since its last snapshots: a snapshot of which no process is to be kept is the
process of an earlier one and these requests, which are made again where it is restored. A digest of the last result
proves that the env has come to the same state.
"""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import replace
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from envhub.arena.memory import ENDED, FRESH, REPORT_PENDING
from envhub.protocol.messages import Failure
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT
from envhub_server.ipc import control
from envhub_server.worker.context import PendingFailure
from envhub_server.worker.gym_compat import innermost
from envhub_server.worker.row import DISABLED, INVALID, EnvRunner, Row, RowSeeds

REQUESTS_MAX = 20_000  # that are kept of one env
REQUESTS_BYTES_MAX = 1 << 24  # of all of them


class KeptResult(NamedTuple):
    """The last result of a row; the arena, which has it, is not mapped in a copy of its process."""

    snapshot: str  # the name of the snapshot
    needs_reset: int
    observation: Any  # as the env gave it


class RequestLog:
    """Runs an env, and keeps what it was asked since the oldest of its last snapshots, encoded."""

    def __init__(self, runner: EnvRunner) -> None:
        self.runner, self.env = runner, runner.env
        self.forget()
        self.result: Any = None  # of the last request, which the row has shown; the info is its last item

    def forget(self) -> None:
        """Keep nothing: the env was changed by something else, or was asked too much."""
        self._requests: list[bytes] = []
        self._nbytes = 0
        self._bases: dict[int, int] = {}  # by serial number of a snapshot, how many requests were before it

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        self._keep("reset", seed, options)
        self.result = self.runner.reset(seed, options)
        return self.result

    def autoreset(self) -> Any:
        self._keep("autoreset")
        self.result = self.runner.autoreset()
        return self.result

    def step(self, action: Any) -> Any:
        if self._bases:  # else no call is made for what is not kept
            self._keep("step", action)
        self.result = self.runner.step(action)
        return self.result

    def reseed(self, seed: int) -> None:
        self._keep("reseed", seed)
        reseed_all(self.env, seed)

    def _keep(self, *request: Any) -> None:
        if not self._bases:
            return
        try:
            self._requests.append(codec.encode([*request]))
        except codec.EncodeError:  # of a class of the env's own
            self.forget()
            return
        self._nbytes += len(self._requests[-1])
        if len(self._requests) > REQUESTS_MAX or self._nbytes > REQUESTS_BYTES_MAX:
            self.forget()

    def begin(self, serial: int) -> None:
        """Keep all requests from now on, which follow this snapshot."""
        self._bases[serial] = len(self._requests)

    def since_last(self, kept: Sequence[int]) -> tuple[int, list[bytes]] | None:
        """The last snapshot of those that are ``kept``, and the requests since then; None if there is none."""
        self._bases = {serial: at for serial, at in self._bases.items() if serial in kept}
        if not self._bases:
            self.forget()
            return None
        last = max(self._bases, key=lambda serial: self._bases[serial])
        return last, self._requests[self._bases[last] :]

    def digest(self) -> bytes:
        """A digest of the last result but its info, and of the env's generator."""
        generator = getattr(innermost(self.env), "_np_random", None)  # the public name would make one
        state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else None
        blob = codec.encode([*self.result[:-1], repr(state)], codec.as_repr)
        return hashlib.blake2b(blob, digest_size=16).digest()

    def replay(self, requests: Sequence[bytes], digest: bytes) -> str:
        """Make these requests again; returns why the env did not come to the same result, else nothing."""
        for request in requests:
            name, *arguments = codec.decode(request)
            getattr(self, name)(*arguments)
        if self.digest() != digest:
            return f"does not repeat: after the same {len(requests)} requests it gave another result"
        return ""


class SnapshotRow(Row):
    """A row that counts its episodes and steps, and whose env is run by a ``RequestLog``."""

    _runner: Any
    steps = episode = 0
    _taken: KeptResult | None = None  # by the snapshot that is taken
    _restored: KeptResult | None = None  # in a restored process, until it has shown this

    def _store(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, method: str = "reset"
    ) -> None:
        super()._store(observation, reward, terminated, truncated, info, method)
        self._restored = None
        if method == "step":
            self.steps += 1
        else:
            self.steps, self.episode = 0, self.episode + 1

    def forget_requests(self) -> None:
        """Keep nothing for later snapshots: none follows, or the env was called, which no replay does again."""
        self._runner.forget()

    # --- taking -------------------------------------------------------------------------------------------------------

    def keep(self, wanted: control.TakeSnapshot) -> list[str]:
        """Keep the row's last result for a copy of this process; returns why it has none."""
        if why := self._why_not_kept():
            return why
        observation = spaces.assemble(self._observation_space, self._observed())
        self._taken = KeptResult(wanted.name, self._needs_reset[self.index], observation)
        self._runner.begin(wanted.serial)
        return []

    def _observed(self) -> Iterator[Any]:
        """The leaves of the last observation; those that the env returned may have changed since."""
        slot = self._done[self.index] & 1
        arrays = iter([leaf[slot, self.index].copy() for leaf in self._arena.observations])
        objects = iter(codec.decode(self._last_objects, self._exact is codec.as_pickle) if self._last_objects else [])
        for leaf in spaces.leaves(self._observation_space):
            yield next(objects if leaf == OBJECT else arrays)

    def _why_not_kept(self) -> list[str]:
        return ["its env, which is to be reset first"] * (self.awaits_first_reset or not self.episode)

    def described(self, serial: int, problems: list[str]) -> control.SnapshotTaken:
        ended = self._needs_reset[self.index] == ENDED
        return control.SnapshotTaken(serial, problems, self.steps, self.episode, ended)

    def derived(self, wanted: control.TakeSnapshot) -> control.SnapshotTaken:
        """The snapshot as an earlier one of those that are kept, and the requests since then, if there is one."""
        taken = self.described(wanted.serial, self._why_not_kept())
        if taken.problems or (since := self._runner.since_last(wanted.kept)) is None:
            return taken
        base, requests = since
        facts = self._needs_reset[self.index], self.steps, self.episode, self._runner.digest()
        return replace(taken, base=base, requests=codec.encode([requests, *facts]))

    # --- restored -----------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Note that this is a copy of the process, which was restored from the snapshot."""
        self._taken, self._restored = None, self._taken

    def replay(self, name: str, blob: bytes) -> str:
        """Come to a later state than that of the process; returns why that has failed, else nothing."""
        requests, needs_reset, self.steps, self.episode, digest = codec.decode(blob)
        if why := self._runner.replay(requests, digest):
            return str(why)
        self._restored = KeptResult(name, needs_reset, self._runner.result[0])
        return ""

    def take_over(self, seeds: RowSeeds, failure: Exception | None, info: bytes, objects: Mapping[int, bytes]) -> None:
        super().take_over(seeds, failure, info, objects)
        if self._restored is not None and not info:  # else the row still has to tell of the end of the last worker
            # A driver that steps before it has seen what is restored, as another client, is told so first.
            self._needs_reset[self.index], self._pending_info = REPORT_PENDING, INVALID
        elif self._restored is not None:  # and no restore has asked for this one, which may be of another row
            self._restored = self._restored._replace(snapshot="")

    def reset_early(self) -> None:
        if self._restored is None:  # else the env is where its next result says
            super().reset_early()

    def _begin(self, needs_reset: int) -> None:
        if self._restored is not None and needs_reset == FRESH and self._mode != DISABLED:
            self._show(self._restored)
        else:
            super()._begin(needs_reset)

    def restore_by(self, snapshot: str, seeds: RowSeeds) -> None:
        """Show the result that the env had when the snapshot was taken, if this row is one of ``seeds``.

        A seed reseeds the generators of the env and of the process, as far as they are known.
        """
        if self.index not in seeds:
            self.repeat_last()
            return
        if self._restored is None or self._restored.snapshot != snapshot:
            text = f"{self._name} was not restored from {snapshot!r}, or its process has ended since"
            raise PendingFailure(Failure("snapshot_lost", "request", text))
        self._show(self._restored)
        if (seed := seeds[self.index]) is not None:
            self._runner.reseed(seed)

    def _show(self, kept: KeptResult) -> None:
        if self.trace is not None:
            self.trace.restored(self, kept.snapshot)
        super()._store(kept.observation, 0.0, False, False, self._runner.result[-1])
        self._needs_reset[self.index], self._restored = kept.needs_reset, None


def reseed_all(env: Any, seed: int) -> None:
    """Seed the generators of an env by Gymnasium, of its action space, and of this process."""
    base = innermost(env)
    if isinstance(getattr(base, "np_random", None), np.random.Generator):
        base.np_random = np.random.default_rng(seed)
    env.action_space.seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
