"""The code that runs in the process of the envs. The hub never imports it. Python 3.8 and later."""
