"""The checkpoint format: names, checksums, documents and boxes. Pure: no I/O, no torch."""
