"""The environments that a hub may make: their settings, the cost of their steps, and the replays of their failures."""
