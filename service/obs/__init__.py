"""What the process shows of itself: logs."""
