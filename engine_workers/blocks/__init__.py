"""What a stored KV block is: its name, its header, and the namespace that it is valid in."""
