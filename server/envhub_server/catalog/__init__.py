"""The environments that a hub may make: what is said of them, what steps cost, what those that failed were asked."""
