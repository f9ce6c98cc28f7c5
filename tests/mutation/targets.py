"""Which modules are mutated, and which unit tests are to notice: those that name the module's rules, and no others."""

from __future__ import annotations

_SESSION = ["test_session", "test_session_workers", "test_session_spares"]
_HUB_PROTOCOL = ["test_hub_protocol", "test_protocol", "test_exactly_once", "test_client_liveness", "test_any_network"]
_CLIENT_PROTOCOL = ["test_client_protocol", "test_protocol", "test_exactly_once", "test_any_network"]
_RECORDED = ["test_row", "test_worker_loop"]

# By module, below the repository's root: the files of ``tests/unit``, the quickest first.
TARGETS: dict[str, list[str]] = {
    "server/envhub_server/network/rights.py": ["test_access", "test_admission", "test_access_rules"],
    "server/envhub_server/network/access.py": ["test_access_rules", "test_access", "test_access_by_proxy"],
    "server/envhub_server/network/connections.py": ["test_access", "test_access_rules", "test_access_by_proxy"],
    "server/envhub_server/network/zmtp_framing.py": ["test_zmtp_framing"],
    "server/envhub_server/log.py": ["test_log_limit"],
    "server/envhub_server/memory/stand_ins.py": ["test_stand_ins", "test_session_memory"],
    "client/envhub_client/session/recovery.py": ["test_recovery"],
    "envhub/protocol/hub.py": _HUB_PROTOCOL,
    "envhub/protocol/client.py": _CLIENT_PROTOCOL,
    "envhub/protocol/validation.py": ["test_validation", "test_protocol", "test_messages"],
    "envhub/protocol/prelude.py": ["test_protocol", "test_messages"],
    "server/envhub_server/session/failover.py": ["test_failover", "test_stand_ins"],
    "server/envhub_server/session/restarts.py": ["test_restarts", *_SESSION],
    "server/envhub_server/session/hang_detector.py": ["test_hang_detector", *_SESSION],
    "server/envhub_server/session/worker_count.py": ["test_worker_count", *_SESSION],
    "server/envhub_server/session/build_order.py": ["test_build_order", "test_specification", *_SESSION],
    "server/envhub_server/session/failure_text.py": ["test_failure_text", "test_exit_cause", *_SESSION],
    "server/envhub_server/session/machine.py": _SESSION,
    "server/envhub_server/session/state.py": _SESSION,
    "server/envhub_server/session/building.py": _SESSION,
    "server/envhub_server/session/client_handlers.py": _SESSION,
    "server/envhub_server/session/making_handlers.py": _SESSION,
    "server/envhub_server/session/process_handlers.py": _SESSION,
    "server/envhub_server/session/request_handlers.py": _SESSION,
    "server/envhub_server/session/table.py": _SESSION,
    "server/envhub_server/session/calls.py": _SESSION,
    "server/envhub_server/session/deadlines.py": _SESSION,
    "server/envhub_server/session/env_history.py": _SESSION,
    "server/envhub_server/session/infos.py": _SESSION,
    "server/envhub_server/session/launcher.py": _SESSION,
    "server/envhub_server/session/ownership.py": _SESSION,
    "server/envhub_server/session/partial_batches.py": _SESSION,
    "server/envhub_server/session/recycling.py": _SESSION,
    "server/envhub_server/session/replacement.py": _SESSION,
    "server/envhub_server/session/replay_orders.py": _SESSION,
    "server/envhub_server/session/requests.py": _SESSION,
    "server/envhub_server/session/sizing.py": _SESSION,
    "server/envhub_server/session/slots.py": _SESSION,
    "server/envhub_server/session/spares.py": _SESSION,
    "server/envhub_server/session/supervision.py": _SESSION,
    "envhub/arena/layout.py": ["test_layout", "test_arena_driver", "test_step_io"],
    "envhub/arena/stand_in.py": ["test_stand_in", "test_stand_ins", *_RECORDED],
    "envhub/arena/driver.py": ["test_arena_driver", "test_step_io", "test_stand_ins"],
    "envhub/values/actions.py": ["test_actions", "test_step_io"],
    "envhub/values/info_columns.py": ["test_info_columns", "test_batch_infos", *_RECORDED],
    "envhub/values/spaces.py": ["test_spaces", *_RECORDED],
    "envhub/values/codec.py": ["test_codec", "test_codec_attacks", "test_messages"],
}
