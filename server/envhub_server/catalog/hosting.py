"""Settings of a session's workers besides envs: the operator's default, and a client's choice within it. Pure."""

from __future__ import annotations

from dataclasses import astuple, replace

from envhub.protocol.messages import Hosting, Recycle


def excess(wanted: Hosting, allowed: Hosting, spares_max: int) -> str:
    """Describe the settings of a shared hub's client that the operator does not allow; empty if there are none."""
    if (wanted.spares or 0) > max(spares_max, allowed.spares or 0):
        return f"spares={wanted.spares}: this hub makes at most spares_max={spares_max} of a session ahead"
    if wanted.shares_process and allowed.shares_process is False:
        return "shared_process=True: this hub's operator says that each of these envs has a process of its own"
    if foreign := sorted(set(wanted.gpus) - set(allowed.gpus)):
        dealt = ", ".join(map(str, allowed.gpus)) or "no devices"
        return f"gpus={foreign}: this hub deals {dealt} to its workers; its operator names others by --gpus"
    if allowed.memory_max and wanted.memory_max is not None and not 0 < wanted.memory_max <= allowed.memory_max:
        return (
            f"memory_max={wanted.memory_max}: this hub's operator allows up to {allowed.memory_max} bytes of a worker"
        )
    return ""


def hosting_of_session(wanted: Hosting, allowed: Hosting, session: int) -> Hosting:
    """The workers' settings in the session of this number.

    Each session begins with the next one of the operator's devices, so that sessions of one worker share them all.
    A worker is recycled by what comes first, the operator's limits or the client's.
    """
    first = session % max(1, len(allowed.gpus))
    asked = {name: value for name, value in vars(wanted).items() if value is not None}
    asked["gpus"] = wanted.gpus or allowed.gpus[first:] + allowed.gpus[:first]
    both = zip(astuple(wanted.recycle), astuple(allowed.recycle), strict=True)
    asked["recycle"] = Recycle(*(min(filter(None, limits), default=0) for limits in both))
    hosting = replace(allowed, **asked)
    if hosting.spares is None and hosting.recycle != Recycle():
        return replace(hosting, spares=1)  # the next worker then takes over without a delay
    return hosting
