"""The other forms of solutions, which are right, and mistakes in those of attention."""

from bank import right
from bank.mistakes import mistakes
from course_lib.teach.exercise import exercises
from course_lib.teach.explaining.mutation.likeness import forms

FORMS = {each.name: forms(each)[1:] for each in exercises().values()}
for exercise, others in FORMS.items():
    for form in others:
        right(exercise)(form)

mistakes("scaled_softmax",
    ("softmax_never_scaled", "without one of its factors, at all 2 places",
     "online_add(m, s, scale * ", "online_add(m, s, ", "math.exp(scale * ", "math.exp("))

(STREAMING,), (FLASH,) = FORMS["attention_streaming"], FORMS["flash_attention"]
BUTTERFLY = """            for step in (16, 8, 4, 2, 1):
                score += cuda.shfl_xor_sync(ALL, score, step)
"""
mistakes("attention_streaming",
    ("streaming_without_butterfly", r"its loops; it is missing before line \d+, `score \*=",
     STREAMING, BUTTERFLY, ""),
    ("streaming_in_16_lanes", r"; line \d+, `for step in \(8", STREAMING, "(16, 8", "(8"),
    ("streaming_scale_squared", r"; line \d+, `score \*= scale", STREAMING, "score *= scale",
     "score *= scale * scale"),
    ("streaming_maximum_too_early", r"line \d+, `factor, weight", STREAMING,
     "new = max(m, score)", "new = max(m, score)\n            m = new",
     "m, total = new, total", "total = total"))

WEIGHT = "+= weights[row, j] * vs[j, d]"
BARRIER = "        cuda.syncthreads()\n        for d in range(col, D, TILE):\n            acc"
mistakes("flash_attention",
    # Some threads leave it out: the races that follow are no missing barrier's.
    ("flash_barrier_for_some", "barrier-divergence in line 26", BARRIER,
     BARRIER.replace("cuda", "if i < T:\n            cuda")),
    ("flash_register_not_rescaled", r"line \d+, `value = ", FLASH,
     "value = acc[d // TILE] * factor", "value = acc[d // TILE]"),
    ("flash_register_of_turned_weights", r"; line \d+, `value \+= ", FLASH,
     WEIGHT, WEIGHT.replace("row, j", "j, row")),
    ("flash_register_of_one_value", r"line \d+, `value \+= ", FLASH,
     WEIGHT, WEIGHT.replace("j, d", "col, d")),
    ("flash_register_divided_each_time", r"line \d+, `acc", FLASH,
     "acc[d // TILE] = value", "acc[d // TILE] = value / total"))
mistakes("flash_attention_causal",
    ("causal_register_of_its_own_weight", r"line \d+, `value \+= ",
     FORMS["flash_attention_causal"][0], WEIGHT, "+= weight * vs[j, d]"),
    ("causal_from_the_upper_left", r"line \d+, `for first.* with the same in another line",
     FORMS["flash_attention_causal"][1], "TILE + S - T)", "TILE)", "<= i + S - T", "<= i"))
mistakes("attention_delta",
    ("delta_in_16_lanes", r"; line \d+, `for step in \(8", *FORMS["attention_delta"],
     "(16, 8", "(8"))
