"""A checkpoint when the job is told to end (`enable_jit_checkpoint`): all ranks save after the same step, and stop."""

from __future__ import annotations

from transformers import Trainer
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.report.events import announce


class SavesOnSignal:
    """Takes the place of Trainer's callback in one training of a pipeline.

    Trainer's own saves wherever a rank finds that its signal has come: other ranks may be at another step by then, and
    amid a step the order of the samples is not at the place that weights and optimizer are at. Its handler of the
    signal stays; here the ranks ask each other between two steps.

    Args:
        trainer: whose callback is set aside until `give_back`.
        topology: the ranks.
    """

    def __init__(self, trainer: Trainer, topology: Topology) -> None:
        self.trainer = trainer
        self.topology = topology
        self._managers: list[tuple[JITCheckpointCallback, CheckpointManager]] = []
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback) and callback.jit_manager is not None:
                self._managers.append((callback, callback.jit_manager))
                callback.jit_manager = None
        self._saved_at = -1
        self._stops = False

    def after_step(self) -> None:
        """Let Trainer save now, and stop, if a signal has come to any rank. A collective call.

        What is due besides is left out: the process may be ended at any moment, and a checkpoint that is written again
        has no state until it is whole.
        """
        if not self.trainer.args.enable_jit_checkpoint:
            return
        control, step = self.trainer.control, self.trainer.state.global_step
        if not self._stops:
            has_come = any(manager.is_checkpoint_requested for _, manager in self._managers)
            self._stops = any(self.topology.gather(has_come))
            if self._stops:
                for _, manager in self._managers:
                    manager.is_checkpoint_requested = False
                control.should_training_stop = control.should_save = True
                if self.topology.rank == 0:
                    announce(f"A signal asked to end the run: checkpoint-{step} is saved, then the training stops.")
        if self._stops:
            control.should_evaluate = False
            control.should_save = control.should_save and self._saved_at != step
        if control.should_save:
            self._saved_at = step

    def give_back(self) -> None:
        """The callback is Trainer's own again; also after an error."""
        for callback, manager in self._managers:
            callback.jit_manager = manager
        self._managers = []
