"""Fleets: which hubs a name stands for, and what each of them does."""
