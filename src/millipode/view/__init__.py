"""Pictures, animations and datasets of a solution."""
