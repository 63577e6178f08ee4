"""Ties that all ranks which wrote elements of the tensors claim, and whose chunks are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.rank_manifest import BoxKey

from .reporttable import RankReport


def agreed_ties(
    reports: Sequence[RankReport], tensors: Mapping[str, TensorRecord]
) -> dict[str, str]:
    """Return alias -> target of what is the same memory on all ranks; no target is an alias.

    A rank reports the chunks of names that it ties itself. So a tensor of which chunks are missing
    is one that a rank, which wrote them, does not tie. Besides, dtype, shape, boxes and checksums
    must be equal: then it does not matter by which chain of claims two names came together.
    """
    roots = _roots(reports)
    chunks: dict[str, dict[BoxKey, int]] = {}
    for report in reports:
        for name, box, crc in report.tied:
            chunks.setdefault(name, {}).setdefault(box, crc)
    groups: dict[object, list[str]] = {}
    for name, root in roots.items():
        tensor, held = tensors.get(name), chunks.get(name, {})
        if tensor is not None and held and len(held) == tensor.chunk_count:
            same = (root, tensor.dtype, tensor.shape, frozenset(held.items()))
            groups.setdefault(same, []).append(name)
    return {alias: group[0] for group in groups.values() for alias in group[1:]}


def _roots(reports: Sequence[RankReport]) -> dict[str, str]:
    """Return name -> the first name of all that claims join, in the order in which names came."""
    roots: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for report in reports:
        for alias, target in report.ties.items():
            for name in (target, alias):
                if name not in roots:
                    roots[name] = name
                    members[name] = [name]
            kept, gone = roots[target], roots[alias]
            if kept != gone:
                for name in members[gone]:
                    roots[name] = kept
                members[kept] += members.pop(gone)
    return roots
