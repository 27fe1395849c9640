"""What is kept for a learner: progress, solutions that passed, hints taken."""
