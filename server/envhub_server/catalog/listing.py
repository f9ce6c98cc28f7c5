"""The names that a hub offers. Workers find them, because only workers import modules with ids and factories."""

from __future__ import annotations

from collections.abc import Collection

from envhub.protocol import messages
from envhub_server.catalog.registry import EnvNotFound, Registry
from envhub_server.ipc import control
from envhub_server.ipc.packages import on_this_machine
from envhub_server.log import Logger
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import WorkerEvent, WorkerExited, WorkerMessage

SLOW_S = 1.0  # for the start of an interpreter, or an import: then the log says where it is
LOOK_S = 0.25  # how often that is looked at, while something starts
LISTING = -1  # in place of a session's number, in events of workers that list names

log = Logger("envhub.listing")


class Listing:
    """The names, which a short-lived worker of each interpreter finds once, and what is wrong with some."""

    def __init__(self, supervisor: Supervisor, registry: Registry, first: int = 0) -> None:
        """List by workers whose numbers are from ``first`` on; only in the first list a problem ends the hub."""
        self.names: list[str] | None = None  # that the hub offers; None before they are known
        # The error for the first entry that can never be made, from the hub's start.
        self.refused: EnvNotFound | None = None
        self._listed: set[int] = set()  # workers that have ended once
        self._modules_failed: set[int] = set()  # workers that could not import a module with ids
        self.unready: dict[str, str] = {}  # by name, the reason why an env could not be made when it was last tried
        # What an interpreter or a module is at that takes long to start, by the names of its envs.
        self.starting: dict[str, str] = {}
        # Likewise, why envs of an interpreter cannot render as the operator says they do.
        self.undrawn: dict[InterpreterKey, str] = {}
        self._supervisor = supervisor
        self._registry = registry
        self._first = first
        self._keys = dict(enumerate(registry.interpreters, first))  # by the numbers of the workers
        self._registered: dict[InterpreterKey, list[str]] = {}
        self.asked: set[int] = set()  # workers that have not said what is registered
        # Workers that find names, or try what is offered, so that ``look`` is due every ``LOOK_S``.
        self.running: set[int] = set()
        self._importing: dict[int, str] = {}  # a module with factories, by the worker that imports it
        self._stages: dict[int, tuple[str, float]] = {}  # what each worker is at, and since when
        self._problems: dict[int, dict[str, str]] = {}  # by worker, the reason why each env is not ready
        self._drawing: set[int] = set()  # workers that have tried the rendering

    @property
    def next_number(self) -> int:
        return self._first + len(self._keys)

    def start(self) -> None:
        for number in self._keys:
            self._start(number)

    def try_again(self, key: InterpreterKey) -> None:
        number = next(number for number, each in self._keys.items() if each == key)
        if number in self.running or not self.unready.keys() & set(self._registry.names(key)):
            return
        try:
            self._start(number)
        except OSError as error:
            # Event: The worker that lists the envs of an interpreter has ended.
            log.warning("env_names_unknown", why=str(error))

    def _start(self, number: int) -> None:
        key = self._keys[number]
        (worker,) = self._supervisor.start(LISTING, [number], key)
        asked = self._registry.modules(key), self._registry.factories(key), self._registry.rendering(key)
        worker.send(control.ListNames(*asked))
        self._drawing.discard(number)
        self.asked.add(number)
        self.running.add(number)
        self._modules_failed.discard(number)
        self._problems[number] = {}

    def look(self, now_s: float) -> None:
        for number in self.running:
            stage, names = self._stage(number)
            if stage != self._stages.get(number, ("", 0.0))[0]:
                self._forget_stage(number)
                self._stages[number] = stage, now_s
            elif stage and now_s >= self._stages[number][1] + SLOW_S:
                for name in names:
                    if self.starting.get(name) != stage:
                        self.starting[name] = stage
                        # Event: The interpreter or the import of an env takes longer than 1 s.
                        log.info("env_starting", env=name, why=stage)

    def _stage(self, number: int) -> tuple[str, Collection[str]]:
        key = self._keys[number]
        if at := self._supervisor.starting(key):
            return at, self._registry.names(key)
        module = self._importing.get(number, "")
        return (f"a worker still imports {module}" if module else ""), self._registry.names_of_module(key, module)

    def _forget_stage(self, number: int) -> None:
        self._stages.pop(number, None)
        for name in self._registry.names(self._keys[number]):
            self.starting.pop(name, None)

    def handle(self, event: WorkerEvent) -> None:
        """Handle an event of a worker; the names are complete once the last worker has reported or ended."""
        number = event.process
        if (key := self._keys.get(number)) is None:
            return  # it lists what was offered before
        match event:
            case WorkerExited(cause=cause):
                if cause.unready:
                    self._problems[number] = dict.fromkeys(self._registry.names(key), cause.unready)
                elif cause.signal and (module := self._importing.pop(number, "")):
                    for name in self._registry.names_of_module(key, module):
                        self._problems[number][name] = (
                            f"the worker that imported {module!r} {cause.how} before it was done"
                        )
                elif number in self.asked:
                    log.warning("env_names_unknown", why=f"the worker that lists them {cause.how}")
                elif number not in self._drawing and self._registry.rendering(key):
                    self._cannot_draw(number, f"the process that tried it {cause.how}")
                self.asked.discard(number)
                self.running.discard(number)
                self._importing.pop(number, None)
                self._forget_stage(number)
                self._tell(self._registry.names(key), self._problems.pop(number))
                for name in self._registry.required & {*self._registry.names(key)} & self.unready.keys():
                    self._refuse(number, EnvNotFound(f"{name!r} is required and not ready: {self.unready[name]}"))
                self._listed.add(number)
            case WorkerMessage(message=control.RowFailed(failure)):
                self._modules_failed.add(number)
                # Event: The import of a module that an env names raised an exception.
                log.warning("module_failed", type=failure.type, why=failure.message)
            case WorkerMessage(message=control.Building(importing=module)):
                self._importing[number] = module
            case WorkerMessage(message=messages.EnvNames(names)):
                self._registered[key] = names
                self._problems[number].update(self._registry.unmatched(key, names))
                self.asked.discard(number)
                if why := self._registry.impossible(key, names, number not in self._modules_failed):
                    self._refuse(number, EnvNotFound(why))
            case WorkerMessage(message=control.RenderingTried(why)):
                self._drawing.add(number)
                self.undrawn.pop(key, None)
                if why:
                    self._cannot_draw(number, why)
            case WorkerMessage(message=control.FactoryFailed() as failed) if failed.entry in self._registry.factories(
                key
            ):
                lone = bool(failed.remedy) and self._registry.lone_factory() == failed.entry
                if not key.is_other and (failed.missing or lone):
                    self._refuse(number, self._registry.not_found(failed.entry, f"{failed.why}{failed.remedy}"))
                why = f"{failed.entry} cannot be made: {failed.why}{failed.remedy}"
                self._problems[number].update(dict.fromkeys(self._registry.names(key, failed.entry), why))
        if not self.asked and (self.names is None or self._registered):
            self.names = self._registry.offered(self._registered)

    def _refuse(self, number: int, error: EnvNotFound) -> None:
        """Have a starting hub end; a later problem does not affect existing sessions."""
        if not self._first and number not in self._listed:
            self.refused = self.refused or error

    @property
    def done(self) -> bool:
        return len(self._listed) == len(self._keys)

    def example(self) -> str:
        return self._registry.example([name for name in self.names or () if name not in self.unready])

    def _cannot_draw(self, number: int, why: str) -> None:
        """Note that the envs of this worker's interpreter cannot render; a factory that cannot be made comes first."""
        key = self._keys[number]
        text = f"rendering by {self._registry.rendering(key)} does not work{on_this_machine()}: {why}"
        self.undrawn[key] = text
        self._problems[number] = {**dict.fromkeys(self._registry.names(key), text), **self._problems[number]}

    def _tell(self, names: Collection[str], wrong: dict[str, str]) -> None:
        for name in names:
            before, why = self.unready.pop(name, ""), wrong.get(name, "")
            if why:
                self.unready[name] = why
            if why and why != before:
                # Event: An env cannot be made now; `why` says what to do.
                log.error("env_unready", env=name, why=why)
            elif before and not why:
                # Event: An env that was unready can be made.
                log.info("env_ready", env=name)
