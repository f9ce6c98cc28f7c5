"""Values to bytes and back: infos, spaces, actions."""
