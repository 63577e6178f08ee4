"""The commit protocol: attempts, slots, publication, cleaning. Only the coordinator writes."""
