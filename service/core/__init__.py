"""The scheduler: pure, standard library and numpy only."""
