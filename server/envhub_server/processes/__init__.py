"""Processes are started, watched and ended here."""
