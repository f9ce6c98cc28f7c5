"""The modules that a client imports on macOS or Windows, for the type checker; run as a program, it prints them.

Read off the source, with the imports in functions, and without the blocks of ``if sys.platform == "linux":``
and ``if TYPE_CHECKING:``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, ROOT / "client", ROOT / "server"]
LINUX = "sys.platform == 'linux'"  # at the end of the condition of a block
# What a program imports by name, and the commands of clients.
ENTRIES = """
    envhub envhub.errors envhub.vector_errors envhub.env_failure envhub_client.record_options envhub_client.make
    envhub_client.client envhub_client.envs.async_vector_env envhub_client.session.options
    envhub_client.option_keywords
    envhub.sb3 envhub.tianshou envhub.rllib envhub.torchrl envhub.pettingzoo envhub_client.frameworks.cleanrl
    envhub.cli envhub.fleet
"""
# The commands that ``envhub.cli`` refuses on other systems, and what ``envhub.fleet`` does.
REFUSED = {f"envhub.cli.{name}" for name in ("bench", "keys", "replays", "serve")}
REFUSED.add("envhub.fleet.fleet")


def path_of(module: str) -> Path | None:
    """The file of a module of EnvHub; None for other modules, and for names in a module."""
    places = [folder.joinpath(*module.split(".")) for folder in FOLDERS]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next(filter(Path.is_file, files), None) if module.startswith("envhub") else None


def imports(node: ast.AST) -> Iterator[str]:
    """The names that may be modules, of every import that other systems than Linux may reach."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith((LINUX, "TYPE_CHECKING")):
            yield from imports(ast.Module(child.orelse, []))
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (child.module or "", *(f"{child.module}.{alias.name}" for alias in child.names))
        else:
            yield from imports(child)


def client_modules() -> list[str]:
    """The modules that are imported from ``ENTRIES`` on, sorted."""
    modules: set[str] = set()
    waiting = ENTRIES.split()
    while waiting:
        module = waiting.pop()
        if module not in modules | REFUSED and (path := path_of(module)) is not None:
            modules.add(module)
            waiting += [module.rpartition(".")[0], *imports(ast.parse(path.read_text()))]
    return sorted(modules)


if __name__ == "__main__":
    print(*client_modules())
