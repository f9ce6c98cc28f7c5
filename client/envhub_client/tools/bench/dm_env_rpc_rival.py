"""dm_env_rpc as a rival: a gRPC server in one process that hosts the envs, and a stream to each of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np

from envhub_client.tools.bench.entrant import SEED, Entrant, Task, cycled
from envhub_client.tools.bench.peer import end_with_stdin, peer
from envhub_client.tools.bench.workloads import factory

ACTION, OBSERVATION, REWARD = 1, 1, 2  # the numbers that the server gives them
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@contextlib.contextmanager
def streams(task: Task) -> Iterator[Entrant]:
    """A stream for each env; every request is sent before any reply is read."""
    grpc: Any = importlib.import_module("grpc")
    connection: Any = importlib.import_module("dm_env_rpc.v1.connection")
    rpc: Any = importlib.import_module("dm_env_rpc.v1.dm_env_rpc_pb2_grpc")
    task.only_arrays()
    with (
        peer(__name__, "serve", task.env, task.num_envs) as address,
        grpc.insecure_channel(address, options=UNLIMITED) as channel,
        _ended([connection.StreamReaderWriter(rpc.EnvironmentStub(channel)) for _ in range(task.num_envs)]) as opened,
    ):
        envs = _Streams(opened)
        envs.join()
        yield Entrant(cycled(envs.step, task.batches), task.num_envs, 1)


@contextlib.contextmanager
def _ended(opened: list[Any]) -> Iterator[list[Any]]:
    try:
        yield opened
    finally:
        for stream in opened:
            stream.write(None)  # the thread that sends its requests ends with them


class _Streams:
    """A batch of envs, each at the end of a stream of its own."""

    def __init__(self, opened: list[Any]) -> None:
        self._opened = opened
        self._messages: Any = importlib.import_module("dm_env_rpc.v1.dm_env_rpc_pb2")
        self._tensors: Any = importlib.import_module("dm_env_rpc.v1.tensor_utils")
        self._packing: Any = importlib.import_module("dm_env_rpc.v1.message_utils")

    def join(self) -> None:
        """Have each env made, seeded, and joined."""
        messages = self._messages
        for row, stream in enumerate(self._opened):
            world = messages.CreateWorldRequest(settings={"seed": self._tensors.pack_tensor(SEED + row)})
            stream.write(messages.EnvironmentRequest(create_world=world))
        self._read("create_world")
        for stream in self._opened:
            stream.write(messages.EnvironmentRequest(join_world=messages.JoinWorldRequest()))
        self._read("join_world")

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray]:
        """The envs' observations and rewards."""
        messages, pack, unpack = self._messages, self._tensors.pack_tensor, self._tensors.unpack_tensor
        for stream, action in zip(self._opened, actions, strict=True):
            step = messages.StepRequest(actions={ACTION: pack(action)}, requested_observations=[OBSERVATION, REWARD])
            stream.write(messages.EnvironmentRequest(step=step))
        found = [reply.observations for reply in self._read("step")]
        observations = np.stack([unpack(tensors[OBSERVATION]) for tensors in found])
        return observations, np.array([unpack(tensors[REWARD]) for tensors in found])

    def _read(self, kind: str) -> list[Any]:
        return [self._packing.unpack_environment_response(stream.read(), kind) for stream in self._opened]


def serve(env: str, num_envs: int) -> None:
    """Be the server: print its address, then host an env for each of up to so many streams, until stdin ends."""
    grpc: Any = importlib.import_module("grpc")
    rpc: Any = importlib.import_module("dm_env_rpc.v1.dm_env_rpc_pb2_grpc")
    server = grpc.server(ThreadPoolExecutor(num_envs), options=UNLIMITED)
    rpc.add_EnvironmentServicer_to_server(_Servicer(env), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    end_with_stdin()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


class _Servicer:
    """Makes a world of one env for each stream, as ``EnvironmentServicer`` says."""

    def __init__(self, env: str) -> None:
        self._factory = factory(env)

    def Process(self, requests: Iterator[Any], context: object) -> Iterator[Any]:
        """Answer the requests of one stream."""
        with contextlib.closing(self._factory()) as env:
            world = _World(env)
            for request in requests:
                yield world.answer(request)


class _World:
    """One env as dm_env_rpc has it: the step after the last of an episode begins the next one."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._seed = 0
        self._running = False
        self._messages: Any = importlib.import_module("dm_env_rpc.v1.dm_env_rpc_pb2")
        self._tensors: Any = importlib.import_module("dm_env_rpc.v1.tensor_utils")

    def answer(self, request: Any) -> Any:
        """The response to one request."""
        messages = self._messages
        match request.WhichOneof("payload"):
            case "create_world":
                self._seed = int(self._tensors.unpack_tensor(request.create_world.settings["seed"]))
                return messages.EnvironmentResponse(create_world=messages.CreateWorldResponse(world_name="env"))
            case "join_world":
                return messages.EnvironmentResponse(join_world=messages.JoinWorldResponse(specs=self._specs()))
            case "step":
                return messages.EnvironmentResponse(step=self._step(request.step))
            case other:
                raise ValueError(f"no answer to {other}")

    def _specs(self) -> Any:
        spec, observation, action = self._spec, self._env.observation_space, self._env.action_space
        return self._messages.ActionObservationSpecs(
            actions={ACTION: spec("action", action.shape, action.dtype)},
            observations={
                OBSERVATION: spec("observation", observation.shape, observation.dtype),
                REWARD: spec("reward", (), np.dtype(np.float64)),
            },
        )

    def _spec(self, name: str, shape: Any, dtype: Any) -> Any:
        return self._messages.TensorSpec(name=name, shape=shape, dtype=self._tensors.np_type_to_data_type(dtype))

    def _step(self, step: Any) -> Any:
        reward = 0.0
        if self._running:
            action = self._tensors.unpack_tensor(step.actions[ACTION])
            observation, given, terminated, truncated, _ = self._env.step(action)
            reward, self._running = float(given), not (terminated or truncated)
        else:
            observation, _ = self._env.reset(seed=self._seed)
            self._running = True
        state = self._messages.RUNNING if self._running else self._messages.TERMINATED
        pack = self._tensors.pack_tensor
        tensors = {OBSERVATION: pack(np.asarray(observation)), REWARD: pack(reward)}
        return self._messages.StepResponse(state=state, observations=tensors)
