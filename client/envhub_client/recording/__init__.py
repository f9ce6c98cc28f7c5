"""Episodes on disk: what a vector env shows goes into memory, which another process reads and writes to disk."""
