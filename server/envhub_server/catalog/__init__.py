"""The environments that a hub may make: their settings, their list, and who may make them."""
