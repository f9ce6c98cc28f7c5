"""Descriptors, signals and time: the hub's loop waits for these."""
