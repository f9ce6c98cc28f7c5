"""Listening, and finding clients that are gone."""
