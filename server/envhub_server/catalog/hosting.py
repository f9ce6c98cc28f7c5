"""What a session's workers get besides envs: the operator's default, and a client's choice within it. Pure."""

from __future__ import annotations

from envhub.protocol.messages import Hosting


def beyond(wanted: Hosting, allowed: Hosting) -> str:
    """What a client of a shared hub wants beyond what its operator allows; empty if nothing is."""
    if foreign := sorted(set(wanted.gpus) - set(allowed.gpus)):
        dealt = ", ".join(map(str, allowed.gpus)) or "no devices"
        return f"gpus={foreign}: this hub deals {dealt} to its workers; its operator names others by --gpus"
    return ""


def granted(wanted: Hosting, allowed: Hosting, session: int) -> Hosting:
    """What the workers of the session of this number get.

    Each session begins with the next one of the operator's devices, so that sessions of one worker share them all.
    """
    first = session % max(1, len(allowed.gpus))
    return Hosting(gpus=wanted.gpus or allowed.gpus[first:] + allowed.gpus[:first])
