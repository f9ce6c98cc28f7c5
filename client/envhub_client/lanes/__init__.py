"""Lane by which the envs of a session are stepped."""
