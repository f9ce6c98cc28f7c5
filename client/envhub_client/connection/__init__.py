"""A connection to a hub, and what keeps it."""
