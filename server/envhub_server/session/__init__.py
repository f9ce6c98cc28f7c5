"""Decisions of a session, and their grounds. Pure."""
