"""Episodes on disk: what an env showed goes into memory, which another process reads and writes to disk."""
