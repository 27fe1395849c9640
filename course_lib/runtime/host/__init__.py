"""What the host does: devices, arrays, launches, and launches remembered."""
