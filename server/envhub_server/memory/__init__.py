"""A session's shared memory, as the hub reads and writes it."""
