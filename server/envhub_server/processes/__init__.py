"""Starts, watches and ends processes."""
