"""What crosses ZeroMQ, without a socket: messages, and both halves of the protocol."""
