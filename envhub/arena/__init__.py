"""One session's shared memory: its layout, who owns what in it, and how it is driven."""
