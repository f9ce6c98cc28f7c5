"""Says what is left of a module that recorded."""

from envhub.errors import ONLY_PROGRAMS_RECORD

raise ImportError(f"envhub.minari is no more: {ONLY_PROGRAMS_RECORD}")
