"""Code that the hub and its child processes share. Python 3.8 and later."""
