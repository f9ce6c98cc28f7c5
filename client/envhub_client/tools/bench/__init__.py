"""``envhub bench``: ways to step the same envs, timed beside each other."""
