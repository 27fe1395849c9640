"""The commands `sanitize`, `trace` and `lint`: scripts of numba.cuda, unchanged, in the simulator.

`command` has their options and exit statuses, `running` runs a script as Python would, `watching`
has the observers that look at its launches, `processes` follows what it forks and names what it
spawns, `formats` writes what was found, and `page` a trace as one HTML file. `in_pytest` watches
the tests of `pytest --cuda-sanitize`.
"""
