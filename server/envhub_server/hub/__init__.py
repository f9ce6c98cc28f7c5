"""The loop: poll, protocol, session, send."""
