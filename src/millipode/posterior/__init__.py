"""What a solve leaves behind: the posterior, dense output, samples, and the Solution that users hold."""
