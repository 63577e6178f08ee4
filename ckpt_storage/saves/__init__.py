"""One save on one rank: plans, shard files, and `save`."""
