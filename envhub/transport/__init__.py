"""Addresses, keys, and the sockets of both sides."""
