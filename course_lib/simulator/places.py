"""Where the simulator is: its own frames and functions are left out of what it says."""

import os

#: The name of the package, and its folder with a separator at the end.
PACKAGE = __package__
FOLDER = os.path.dirname(__file__) + os.sep
