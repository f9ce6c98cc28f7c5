"""The protocol over ZeroMQ, without a socket: the messages, and the hub's and the client's half."""
