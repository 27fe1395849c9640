"""Launches that are watched: what observers are told, and of which memory."""
