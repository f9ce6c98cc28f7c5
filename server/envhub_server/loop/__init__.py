"""What the hub's loop waits for: descriptors, signals and time."""
