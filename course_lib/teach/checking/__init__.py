"""A check: run the learner's object on every case, watch it, judge what came out."""
