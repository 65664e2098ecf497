"""`Pipe`: pipeline parallelism for an `nn.Sequential` over the devices of one process (GPipe).

Replaces `torch.distributed.pipeline.sync`, which PyTorch had until 2.3, and torchgpipe.
"""

from hf_pipetransformer.pipe.balance import balance_by_size, balance_by_time, partition_model
from hf_pipetransformer.pipe.batchnorm import DeferredBatchNorm
from hf_pipetransformer.pipe.micro_batches import NoChunk
from hf_pipetransformer.pipe.pipe import GPipe, Pipe
from hf_pipetransformer.pipe.recomputation import is_checkpointing, is_recomputing
from hf_pipetransformer.pipe.stages import WithDevice


__all__ = [
    "DeferredBatchNorm",
    "GPipe",
    "NoChunk",
    "Pipe",
    "WithDevice",
    "balance_by_size",
    "balance_by_time",
    "is_checkpointing",
    "is_recomputing",
    "partition_model",
]
