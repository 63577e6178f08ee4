"""The formats that `convert` reads and writes, one module each."""
