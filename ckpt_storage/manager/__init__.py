"""When to save, what to keep, where to resume."""
