"""What the process shows of itself: logs, metrics and traces."""
