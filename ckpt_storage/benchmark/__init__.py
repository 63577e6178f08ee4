"""What `ckpt-storage bench` runs: saves, loads and exports against the floor of a storage.

Called by the command line and by `python -m ckpt_storage.benchmark.scale`; nothing else imports
it. Knows the library only by its public functions.
"""
