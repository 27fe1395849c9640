"""A launch: kernel objects, turns of the threads, limits, and errors in the user's words."""
