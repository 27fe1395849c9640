"""The functions of `reference`, a file for what belongs together."""
