"""The hub's hands in the arena."""
