"""What a session decides, and what it decides by. Pure."""
