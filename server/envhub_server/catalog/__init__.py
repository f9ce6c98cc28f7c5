"""The environments that a hub may make: their settings and their list."""
