"""One session on a hub: its making, its options, its recovery, its end."""
