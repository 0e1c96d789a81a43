"""Steps: programs as tasks, and their times."""
