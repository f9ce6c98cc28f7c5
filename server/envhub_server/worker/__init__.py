"""What runs in the process of the envs. The hub's loop never imports it. Python 3.8 and later."""
