"""Episodes on disk: what the trainer sees goes into memory, which another process reads and writes to disk."""
