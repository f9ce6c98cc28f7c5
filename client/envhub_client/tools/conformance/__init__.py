"""``envhub conformance``: what is checked of a hub, from outside."""
