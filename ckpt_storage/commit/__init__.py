"""The commit protocol: attempts, slots, publication, freeing, deletion. One rank calls it."""
