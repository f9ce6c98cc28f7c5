"""Who connects, and whether they are still there."""
