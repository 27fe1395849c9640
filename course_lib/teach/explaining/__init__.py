"""Why an answer is wrong, and in which line, said where the evidence is certain."""
