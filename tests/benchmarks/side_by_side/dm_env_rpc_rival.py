"""dm_env_rpc as a rival: a gRPC server in one process that hosts the envs, and a stream to each of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np

from side_by_side.arrays import only_arrays
from side_by_side.entrant import SEED, Entrant, Task, cycled, factory
from side_by_side.peer import announce, peer

ACTION, OBSERVATION, REWARD = 1, 1, 2  # the numbers that the server gives them
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def _module(name: str) -> Any:
    return importlib.import_module(f"dm_env_rpc.v1.{name}")


@contextlib.contextmanager
def streams(task: Task) -> Iterator[Entrant]:
    """A stream for each env; every request is sent before any reply is read."""
    grpc: Any = importlib.import_module("grpc")
    connection, rpc, messages = _module("connection"), _module("dm_env_rpc_pb2_grpc"), _module("dm_env_rpc_pb2")
    pack, unpack = _module("tensor_utils").pack_tensor, _module("tensor_utils").unpack_tensor
    response = _module("message_utils").unpack_environment_response
    only_arrays(task)
    with (
        peer(__name__, "serve", task.entry, task.num_envs) as address,
        grpc.insecure_channel(address, options=UNLIMITED) as channel,
        _ended([connection.StreamReaderWriter(rpc.EnvironmentStub(channel)) for _ in range(task.num_envs)]) as opened,
    ):

        def ask(kind: str, requests: Iterable[Any]) -> list[Any]:
            for stream, request in zip(opened, requests, strict=True):
                stream.write(messages.EnvironmentRequest(**{kind: request}))
            return [response(stream.read(), kind) for stream in opened]

        def step(actions: Any) -> tuple[np.ndarray, np.ndarray]:
            wanted = [OBSERVATION, REWARD]
            packed = ({ACTION: pack(action)} for action in actions)
            replies = ask(
                "step", (messages.StepRequest(actions=each, requested_observations=wanted) for each in packed)
            )
            observations = np.stack([unpack(reply.observations[OBSERVATION]) for reply in replies])
            return observations, np.array([unpack(reply.observations[REWARD]) for reply in replies])

        settings = ({"seed": pack(SEED + row)} for row in range(task.num_envs))
        ask("create_world", (messages.CreateWorldRequest(settings=each) for each in settings))
        ask("join_world", [messages.JoinWorldRequest()] * task.num_envs)
        yield Entrant(cycled(step, task.batches), task.num_envs, 1)


@contextlib.contextmanager
def _ended(opened: list[Any]) -> Iterator[list[Any]]:
    try:
        yield opened
    finally:
        for stream in opened:
            stream.write(None)  # the thread that sends its requests ends with them


def serve(env: str, num_envs: int) -> None:
    """Be the server: print its address, then host an env for each of up to ``num_envs`` streams, until stdin ends."""
    grpc: Any = importlib.import_module("grpc")
    server = grpc.server(ThreadPoolExecutor(num_envs), options=UNLIMITED)
    _module("dm_env_rpc_pb2_grpc").add_EnvironmentServicer_to_server(_Servicer(env), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    announce(f"127.0.0.1:{port}")
    server.wait_for_termination()


class _Servicer:
    """Makes a world of one env for each stream; the step after the last of an episode begins the next one."""

    def __init__(self, env: str) -> None:
        self._factory = factory(env)

    def Process(self, requests: Iterator[Any], context: object) -> Iterator[Any]:
        """Answer the requests of one stream, as ``EnvironmentServicer`` says."""
        messages, tensors = _module("dm_env_rpc_pb2"), _module("tensor_utils")
        seed, running = 0, False
        with contextlib.closing(self._factory()) as env:
            for request in requests:
                answer: Any
                match kind := request.WhichOneof("payload"):
                    case "create_world":
                        seed = int(tensors.unpack_tensor(request.create_world.settings["seed"]))
                        answer = messages.CreateWorldResponse(world_name="env")
                    case "join_world":
                        answer = messages.JoinWorldResponse(specs=_specs(env))
                    case "step":
                        reward: Any = 0.0
                        if running:
                            action = tensors.unpack_tensor(request.step.actions[ACTION])
                            observation, reward, terminated, truncated, _ = env.step(action)
                            running = not (terminated or truncated)
                        else:
                            observation, _ = env.reset(seed=seed)
                            running = True
                        observed = {OBSERVATION: np.asarray(observation), REWARD: float(reward)}
                        answer = messages.StepResponse(
                            state=messages.RUNNING if running else messages.TERMINATED,
                            observations={number: tensors.pack_tensor(value) for number, value in observed.items()},
                        )
                    case other:
                        raise ValueError(f"no answer to {other}")
                yield messages.EnvironmentResponse(**{kind: answer})


def _specs(env: gymnasium.Env[Any, Any]) -> Any:
    messages, dtypes = _module("dm_env_rpc_pb2"), _module("tensor_utils").np_type_to_data_type

    def spec(name: str, shape: Any, dtype: Any) -> Any:
        return messages.TensorSpec(name=name, shape=shape, dtype=dtypes(dtype))

    action, observation = env.action_space, env.observation_space
    return messages.ActionObservationSpecs(
        actions={ACTION: spec("action", action.shape, action.dtype)},
        observations={
            OBSERVATION: spec("observation", observation.shape, observation.dtype),
            REWARD: spec("reward", (), np.dtype(np.float64)),
        },
    )
