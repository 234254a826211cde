"""Drives the real Scheduler on a virtual clock."""
