"""Skip connections: a module stashes a tensor under a name, and a later one pops it, past the modules between them."""

from hf_pipetransformer.pipe.skip.layout import verify_skippables
from hf_pipetransformer.pipe.skip.namespace import Namespace
from hf_pipetransformer.pipe.skip.skippable import pop, skippable, stash


__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
