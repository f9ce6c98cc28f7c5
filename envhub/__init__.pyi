"""What ``envhub`` has, for type checkers and editors; ``__init__.py`` imports each name when it is used."""

from envhub_client.client import Client as Client
from envhub_client.client import connect as connect
from envhub_client.envs.async_vector_env import AsyncVectorEnv as AsyncVectorEnv
from envhub_client.envs.single_env import HubEnv as HubEnv
from envhub_client.envs.snapshots import Snapshot as Snapshot
from envhub_client.envs.vector_env import HubVectorEnv as HubVectorEnv
from envhub_client.envs.vector_env import StepObserver as StepObserver
from envhub_client.frameworks.cleanrl import legacy_infos as legacy_infos
from envhub_client.make import make as make
from envhub_client.make import make_vec as make_vec
from envhub_client.option_keywords import MakeKeywords as MakeKeywords
from envhub_client.record_options import RecordOptions as RecordOptions
from envhub_client.session.description import Sizing as Sizing
from envhub_client.session.options import FaultOptions as FaultOptions
from envhub_client.session.options import HostingOptions as HostingOptions
from envhub_client.session.options import SessionOptions as SessionOptions
from envhub_server.serve import serve as serve
from envhub_server.worker.row import EnvRunner as EnvRunner

from envhub import errors as errors
from envhub import fleet as fleet
from envhub import pettingzoo as pettingzoo
from envhub import rllib as rllib
from envhub import sb3 as sb3
from envhub import tianshou as tianshou
from envhub import torchrl as torchrl
from envhub.action_chunk import ActionChunk as ActionChunk
from envhub.env_failure import EnvFailure as EnvFailure
from envhub.errors import AccessDenied as AccessDenied
from envhub.errors import AddressError as AddressError
from envhub.errors import ConnectionInUse as ConnectionInUse
from envhub.errors import EnvHubError as EnvHubError
from envhub.errors import EnvRaised as EnvRaised
from envhub.errors import EnvTimeout as EnvTimeout
from envhub.errors import Forked as Forked
from envhub.errors import HubLost as HubLost
from envhub.errors import HubTimeout as HubTimeout
from envhub.errors import HubUnreachable as HubUnreachable
from envhub.errors import KeysError as KeysError
from envhub.errors import LocalProtocolError as LocalProtocolError
from envhub.errors import ProtocolError as ProtocolError
from envhub.errors import RemoteProtocolError as RemoteProtocolError
from envhub.errors import RequestRefused as RequestRefused
from envhub.errors import RestartsExhausted as RestartsExhausted
from envhub.errors import SessionLost as SessionLost
from envhub.errors import SnapshotLimit as SnapshotLimit
from envhub.errors import SnapshotLost as SnapshotLost
from envhub.errors import SnapshotRefused as SnapshotRefused
from envhub.errors import SpaceMismatch as SpaceMismatch
from envhub.errors import UnsupportedSpace as UnsupportedSpace
from envhub.errors import VersionMismatch as VersionMismatch
from envhub.errors import WorkerDied as WorkerDied
from envhub.vector_errors import NothingPending as NothingPending
from envhub.vector_errors import SessionBusy as SessionBusy
from envhub.vector_errors import SessionClosed as SessionClosed

__version__: str
__all__: list[str]
