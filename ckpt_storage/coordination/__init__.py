"""Ranks that agree, meet and fail together, over a torch.distributed store."""
