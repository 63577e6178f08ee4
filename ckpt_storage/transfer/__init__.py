"""Bytes between memory and a store: verified, many at a time, in bounded memory."""
