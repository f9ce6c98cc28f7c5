"""What may be made, and what is known of it."""
