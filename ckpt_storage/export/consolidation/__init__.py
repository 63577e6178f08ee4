"""Consolidation of a checkpoint to Hugging Face safetensors, on all ranks, from and to any storage.

`plan` is pure and the same on every rank; executors carry it out.
"""
