"""`Accelerator` of a model on stages, as accelerate has its own for DeepSpeed and Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from hf_pipetransformer.comm.groups import let_group_threads_finish


if TYPE_CHECKING:
    from hf_pipetransformer.training.session import PipelineSession


class PipelineAccelerator(Accelerator):
    """`Accelerator` that knows that each rank has a part of the gradients, and that some ranks compute no loss.

    It takes over all that Trainer's own has, which is used no more. Without a training in stages it does the same.
    """

    def __init__(self, own: Accelerator) -> None:
        # Not Accelerator's constructor: its settings are made from options that only Trainer reads.
        self.__dict__.update(vars(own))
        self.session: PipelineSession | None = None
        """What the pipeline adds to the trainer; None in the trainer's constructor."""
        self._gathers_nothing = False

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole model's gradients, which is returned. Collective: call on every rank."""
        training = None if self.session is None else self.session.present
        if training is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return training.clip_gradients(max_norm)

    def gather(self, tensor: Any) -> Any:
        """Gather from all ranks; inside `gathering_nothing`, return what is given."""
        return tensor if self._gathers_nothing else super().gather(tensor)

    @contextmanager
    def gathering_nothing(self) -> Iterator[None]:
        """Wrap code of Trainer or TRL that gathers, but that only some ranks run."""
        # Such contexts nest: a loss that is discarded may lie within the part of a batch.
        outer, self._gathers_nothing = self._gathers_nothing, True
        try:
            yield
        finally:
            self._gathers_nothing = outer

    def end_training(self) -> None:
        """Leave the process group, once the threads of the pipeline's own groups have ended."""
        let_group_threads_finish()
        super().end_training()
