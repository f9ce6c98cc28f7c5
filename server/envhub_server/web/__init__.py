"""The web page of a hub and its metrics: a process of its own, which is an ordinary client of the hub."""
