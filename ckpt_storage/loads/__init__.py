"""One load on one rank: plans, targets, reads that ranks share, and `load`."""
