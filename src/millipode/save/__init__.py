"""Save plans: what a solve keeps of its steps, and where."""
