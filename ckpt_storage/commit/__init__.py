"""The commit protocol: attempts, slots, publication, cleaning. One rank of a save calls it."""
