"""This program's own hub."""
