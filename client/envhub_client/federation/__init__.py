"""One session over several hubs: its envs are divided among them, and step as one batch."""
