"""Kernels that show what the sanitizer finds: planted bugs, and correct look-alikes.

`python tests/sanitizer_cases` runs them all and prints one table. Every kernel is plain
numba.cuda, so that a GPU and NVIDIA's compute-sanitizer can judge it too:
`compute-sanitizer --tool racecheck python tests/sanitizer_cases --gpu NAME`. Those with
clusters alone, for which numba.cuda has no names, run in the simulator only.
"""

from sanitizer_cases import (
    block_races,
    bounds,
    clean_blocks,
    clean_grids,
    clusters,
    implicit,
    meetings,
    polls,
    publishing,
    records,
    shared_races,
    waiting,
)
from sanitizer_cases.case import CASES, Case, Outcome, run, run_on_gpu

__all__ = ["CASES", "Case", "Outcome", "block_races", "bounds", "clean_blocks", "clean_grids",
           "clusters", "implicit", "meetings", "polls", "publishing", "records", "run",
           "run_on_gpu", "shared_races", "waiting"]
