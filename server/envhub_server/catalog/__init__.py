"""The environments that a hub may make, and the costs of their steps."""
