"""What is wrong with a launch: races, barriers, memory that nobody wrote."""
