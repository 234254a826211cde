"""Runs the plans of the scheduler: one forward pass a step."""
