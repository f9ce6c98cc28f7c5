"""``envhub service``: runs ``envhub serve`` by systemd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from envhub.cli import EXIT_FAILED, end, print_line

User = Annotated[bool, Parameter(name="--user", help="By the service manager of this user, and not of the system.")]
UnitName = Annotated[str, Parameter(name="--unit", help="Name of the service.")]


def install(
    *serve: Annotated[str, Parameter(allow_leading_hyphen=True)],
    user: User = False,
    unit: UnitName = "envhub",
    run_as: str | None = None,
    print_only: Annotated[bool, Parameter(name="--print")] = False,
) -> None:
    """Write a unit of systemd that runs ``envhub serve`` with these arguments, in this folder.

    It starts nothing, and says what to run next. Without systemd it exits with 1.

    Parameters
    ----------
    serve
        The envs and options of ``envhub serve``, such as --config hub.toml; they are checked first.
    run_as
        The user that the hub and its envs run as; by default the one who runs ``sudo``. Not with --user.
    print_only
        Print the unit, and write nothing.
    """
    from envhub_server.serve import read_configuration
    from envhub_server.systemd import MARK, unit_of

    from envhub.cli.commands import app

    bound = app.parse_args(["serve", *serve])[1].arguments
    try:
        config, *_ = read_configuration(bound.get("env", ()), bound.get("options"), bound.get("config"))
    except ValueError as error:
        end("service install", error)
    if not user and (run_as := run_as or os.environ.get("SUDO_USER")) is None:
        end("service install", "name the user that its envs run as by --run-as, or give --user")
    drain_s = config.drain_timeout + config.drain_close_timeout
    program = Path(sys.argv[0]).absolute()
    own = [str(program)] if program.name == "envhub" and os.access(program, os.X_OK) else ["-m", "envhub"]
    text = unit_of([sys.executable, *own, "serve", *serve], os.getcwd(), drain_s, None if user else run_as)
    if print_only:
        print_line(text.rstrip())
        return
    path = _path("install", user, unit)
    if path.exists() and not path.read_text().startswith(MARK):
        end("service install", f"{path} is not of `envhub service install`: remove it, or name another --unit")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print_line(f"wrote {path}; now run:")
    print_line(f"  {' '.join(_systemctl(user))} daemon-reload")
    print_line(f"  {' '.join(_systemctl(user))} enable --now {unit}")
    if user:
        print_line("  loginctl enable-linger  # so that it also runs while you are not logged in")


def uninstall(*, user: User = False, unit: UnitName = "envhub") -> None:
    """Stop the service and remove its unit, if ``envhub service install`` has written it."""
    from envhub_server.systemd import MARK

    path = _path("uninstall", user, unit)
    if not path.is_file() or not path.read_text().startswith(MARK):
        end("service uninstall", f"there is no {path} that `envhub service install` has written", EXIT_FAILED)
    stopped = subprocess.run([*_systemctl(user), "disable", "--now", unit], check=False)
    if stopped.returncode:
        end("service uninstall", f"{path} stays, since {' '.join(stopped.args)} has failed", EXIT_FAILED)
    # One that failed stays listed otherwise; one that is not loaded any more cannot be reset, which does no harm.
    subprocess.run([*_systemctl(user), "reset-failed", unit], stderr=subprocess.DEVNULL, check=False)
    path.unlink()
    subprocess.run([*_systemctl(user), "daemon-reload"], check=True)
    print_line(f"removed {path}")


def _systemctl(user: bool) -> list[str]:
    return ["systemctl", *(["--user"] if user else [])]


def _path(command: str, user: bool, unit: str) -> Path:
    from envhub_server.systemd import BOOTED

    if not os.path.isdir(BOOTED):
        why = "this machine is not run by systemd: start `envhub serve` by the program that starts its services"
        end(f"service {command}", f"{why}; --print shows the unit", EXIT_FAILED)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return (Path(config, "systemd/user") if user else Path("/etc/systemd/system")) / f"{unit}.service"
