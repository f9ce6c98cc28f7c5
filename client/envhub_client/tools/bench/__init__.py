"""``envhub bench``: ways to step the same envs, timed in one run."""
