"""From a kernel's source to the function that runs for one of its threads."""
