"""The metrics of a hub for Prometheus, which asks the hub whenever they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import envhub
from envhub.errors import EnvHubError

PAIRS_MAX = 100  # of an env and a client that have labels of their own
NAMES_MAX = 100  # of envs that are unready
OTHER = "other"  # the label of all further ones
LABELS = ("env", "client")

Row = Mapping[str, Any]
Pair = tuple[str, str]


class Look(NamedTuple):
    """Answers of a hub to what the metrics and the page need of it."""

    stats: dict[str, Any]  # its health among them
    sessions: list[dict[str, Any]]
    ended: list[dict[str, Any]]


def client_of(row: Row) -> str:
    """The name of a session's key, or the user of this machine."""
    owner = row.get("owner") or {}
    return str(owner.get("key") or owner.get("user") or "-")


def _longest_s(row: Row) -> float:
    active = (each["since_s"] for each in row.get("processes", ()) if each["doing"] != "waiting")
    return max((since_s for since_s in active if since_s is not None), default=0.0)


def _ms(times: str, quantile: str) -> Callable[[Row], float]:
    return lambda row: ((row.get(times) or {}).get(quantile) or 0.0) / 1000


# By name: the help, the value of a session's row, and how those of several sessions become one.
GAUGES: dict[str, tuple[str, Callable[[Row], float], Callable[[Iterable[float]], float]]] = {
    "envhub_sessions": ("Sessions that exist.", lambda row: 1, sum),
    "envhub_leased_sessions": ("Sessions whose client is out of reach.", lambda row: bool(row["leased"]), sum),
    "envhub_envs": ("Envs of sessions.", lambda row: row["num_envs"], sum),
    "envhub_workers": ("Worker processes.", lambda row: len(row["workers"]), sum),
    "envhub_memory_bytes": ("Memory of workers.", lambda row: row.get("memory_bytes") or 0, sum),
    "envhub_cpus_used": ("CPUs that workers used lately.", lambda row: row.get("cpu") or 0.0, sum),
    "envhub_steps_per_second": ("Steps of envs lately.", lambda row: row.get("steps_per_s") or 0.0, sum),
    "envhub_step_p50_seconds": ("Median of a step, of the slowest session.", _ms("step_ms", "p50"), max),
    "envhub_step_p99_seconds": ("99 % of a step, of the slowest session.", _ms("step_ms", "p99"), max),
    "envhub_env_p99_seconds": ("99 % of the envs' own part of a step, likewise.", _ms("env_ms", "p99"), max),
    "envhub_longest_request_seconds": ("Time that a worker has been at one request.", _longest_s, max),
}
# By name: the help, and the field of a session's row.
COUNTERS = {
    "envhub_steps_total": ("Steps and resets of envs.", "steps"),
    "envhub_restarts_total": ("Restarts of workers.", "restarts"),
    "envhub_recycled_total": ("Workers that were recycled.", "recycled"),
    "envhub_cpu_seconds_total": ("CPU time of workers.", "cpu_s"),
}
# By name: the help, and the field of ``Client.stats`` or of the capacity in it.
HUB = {
    "envhub_arena_bytes": ("Shared memory of sessions.", "arena_bytes"),
    "envhub_connections": ("Connections of clients.", "connections"),
    "envhub_descriptors": ("Descriptors that the hub uses.", "descriptors"),
    "envhub_descriptors_max": ("Descriptors that the hub may use.", "descriptors_max"),
    "envhub_replays_bytes": ("Files of replays.", "replays_bytes"),
    "envhub_replays_bytes_max": ("Limit of the files of replays.", "replays_bytes_max"),
    "envhub_cpus": ("CPUs that the hub may use.", "cpus"),
    "envhub_cpus_free": ("CPUs that are free, as estimated.", "cpus_free"),
    "envhub_envs_free": ("Envs that may be made.", "envs_free"),
    "envhub_sessions_free": ("Sessions that may be made.", "sessions_free"),
    "envhub_requests_total": ("Requests, without heartbeats.", "requests"),
    "envhub_replayed_requests_total": ("Requests whose reply was sent again.", "replayed"),
    "envhub_refused_requests_total": ("Requests that were not begun.", "refused"),
    "envhub_malformed_messages_total": ("Messages that cannot be read.", "malformed"),
    "envhub_connections_ended_total": ("Connections that the hub has ended.", "connections_ended"),
    "envhub_handshakes_refused_total": ("Clients without a known key.", "handshakes_refused"),
    "envhub_handshakes_unfinished_total": ("Clients that left before they had shown a key.", "handshakes_unfinished"),
}


class HubCollector(Collector):
    """Makes the metrics of what the hub answers. Counters of envs and clients count from the first ``take`` on."""

    def __init__(self, look: Callable[[], Look], hub: str, registry: CollectorRegistry) -> None:
        self._look, self._hub = look, hub
        self._lock = threading.Lock()
        self._pairs: set[Pair] = set()
        self._last: dict[str, list[float]] | None = None  # by session, what was counted of it
        self._ended: set[str] = set()
        disable_created_metrics()
        registry.register(self)  # before the counters, which it updates when it is collected
        self._counters = [Counter(name, text, LABELS, registry=registry) for name, (text, _) in COUNTERS.items()]
        self._made = Counter("envhub_sessions_made_total", "Sessions that were made.", LABELS, registry=registry)
        by = *LABELS, "by"
        self._ends = Counter("envhub_sessions_ended_total", "Sessions that ended.", by, registry=registry)

    def collect(self) -> Iterator[Metric]:
        try:
            look = self._look()
        except EnvHubError:
            yield GaugeMetricFamily("envhub_up", "Whether the hub answers.", 0)
            return
        self.take(look)
        yield GaugeMetricFamily("envhub_up", "Whether the hub answers.", 1)
        yield from self._of_hub(look)
        rows: dict[Pair, list[Row]] = {}
        for row in look.sessions:
            rows.setdefault(self._pair(row), []).append(row)
        for name, (text, value, together) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for pair, own in rows.items():
                family.add_metric(pair, together(map(value, own)))
            yield family

    def describe(self) -> list[Metric]:
        return []  # so that nothing is asked before it is scraped

    def take(self, look: Look) -> None:
        """Count what the sessions have done since the last time, also those that have ended meanwhile."""
        with self._lock:
            last, now = self._last, dict[str, list[float]]()
            ended = {row["session"] for row in look.ended}
            for row in [*look.ended, *look.sessions]:
                name, is_ended = row["session"], "ended_s" in row
                # A session may have ended after the hub was asked for those that there are.
                if name in (self._ended if is_ended else ended):
                    continue
                values = [float(row.get(field) or 0) for _, field in COUNTERS.values()]
                if not is_ended:
                    now[name] = values
                if last is not None:
                    self._count(row, values, last.get(name), is_ended)
            self._last, self._ended = now, ended

    def _count(self, row: Row, values: list[float], before: list[float] | None, is_ended: bool) -> None:
        pair = self._pair(row)
        self._made.labels(*pair).inc(before is None)
        for counter, value, counted in zip(self._counters, values, before or [0.0] * len(values), strict=True):
            counter.labels(*pair).inc(max(0.0, value - counted))
        if is_ended:
            self._ends.labels(*pair, str(row["by"]).partition(" ")[0]).inc()

    def _pair(self, row: Row) -> Pair:
        pair = str(row["env"]), client_of(row)
        if pair not in self._pairs and len(self._pairs) >= PAIRS_MAX:
            return OTHER, OTHER
        self._pairs.add(pair)
        return pair

    def _of_hub(self, look: Look) -> Iterator[Metric]:
        stats = {**look.stats, **(look.stats.get("capacity") or {})}
        yield InfoMetricFamily("envhub", "The hub.", {"hub": self._hub, "version": envhub.__version__})
        yield GaugeMetricFamily("envhub_draining", "Whether the hub is ending.", stats["status"] != "ok")
        yield GaugeMetricFamily("envhub_uptime_seconds", "Age of the hub.", stats["uptime_s"])
        lag = "Longest time of the last minute for which the hub was busy."
        yield GaugeMetricFamily("envhub_loop_lag_seconds", lag, stats["loop_lag_s"])
        unready = GaugeMetricFamily("envhub_env_unready", "Envs that cannot be made now.", labels=["env"])
        for name in sorted(stats["unready"])[:NAMES_MAX]:
            unready.add_metric([name], 1)
        yield unready
        failures = CounterMetricFamily("envhub_failures_total", "Requests that failed.", labels=["code"])
        for code, count in (stats.get("failures") or {}).items():
            failures.add_metric([code], count)
        yield failures
        for name, (text, field) in HUB.items():
            if stats.get(field) is not None:
                yield (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, stats[field])
