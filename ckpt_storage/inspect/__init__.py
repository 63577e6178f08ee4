"""Reading without a process group: open, compare, verify, and examine a storage."""
