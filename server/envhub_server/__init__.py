"""The hub: one process that owns environments, supervises their workers and answers clients over ZeroMQ."""
