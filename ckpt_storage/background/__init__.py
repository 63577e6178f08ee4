"""Saves in the background: staging, threads, worker processes, handles."""
