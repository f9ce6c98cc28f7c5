"""Gymnasium's classes over a session."""
