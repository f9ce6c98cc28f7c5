"""``envhub bench``: ways to step a user's envs on this machine, timed in one run."""
