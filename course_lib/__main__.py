"""`python -m course_lib`."""

import sys

from course_lib.cli import main

for stream in sys.stdout, sys.stderr:
    if stream is not None:  # what a terminal's encoding lacks must not end the work: '?' for '✓'
        stream.reconfigure(errors="replace")
sys.exit(main())
