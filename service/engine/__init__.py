"""The engine thread, and the two places where it meets the event loop."""
