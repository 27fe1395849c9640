"""What `python -m course_lib bench` measures: one file per operation."""
