"""One module for each family of storages, on the seam `store.backend`."""
