"""Addresses, and the ZeroMQ sockets of both sides."""
