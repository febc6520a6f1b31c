"""Smoothing: from what the past says of a state to what all of the data say."""
