"""Checkpoints of PyTorch Distributed Checkpoint (DCP) on any storage: safe, verified, fast.

Everything public is imported from here; `__init__.pyi` lists it. A name is loaded on first use
(PEP 562), so that `import ckpt_storage` stays cheap and imports no torch.
"""

import lazy_loader

from ._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
