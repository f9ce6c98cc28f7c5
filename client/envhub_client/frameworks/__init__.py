"""Envs of a hub as training frameworks want them: a module for each, which imports its framework."""
