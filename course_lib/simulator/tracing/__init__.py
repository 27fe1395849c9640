"""What the warps of a launch ask of memory."""
