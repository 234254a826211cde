"""Other libraries' attention on the cases that ours is timed on. Yardsticks of the check, never dependencies."""
