"""How the envs of a session are stepped."""
