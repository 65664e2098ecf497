"""Loading of saved weights by the stages that use them: to resume a run, and of the best model at its end."""

from __future__ import annotations

from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.runtime.context import Context
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.state.weights import find_weights, has_weights, is_of_adapters, load_weights


class WeightLoading:
    """Reads saved weights rank by rank. Trainer resumes before the model is split, when no rank knows its stage."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._expected: str | None = None

    def expect(self, folder: str) -> None:
        """Check that saved weights fit, and note them for `load_expected`. Collective: call on every rank.

        Adapters are loaded at once.

        Raises:
            ValueError: on every rank, if they do not fit.
        """
        model, topology = self.context.trainer.model, self.context.topology
        if topology.together(lambda: is_of_adapters(folder)):
            topology.together(lambda: load_weights(model, folder))
            return
        self._expected = folder
        if topology.together(lambda: find_weights(model, folder)) is None and topology.rank == 0:
            announce(
                f"transformers makes tensors of {type(model).__name__} from several in {folder!r}: every rank reads "
                "all of them and keeps those of its stage."
            )

    def load_expected(self, stage: Stage | None) -> None:
        """Load what a stage uses of the weights to resume from, if any; all of them if there is no stage.

        Collective: call on every rank.
        """
        folder, self._expected = self._expected, None
        if folder is not None:
            self._load(folder, stage)

    def forget(self) -> None:
        """Expect no weights any more: the training has ended."""
        self._expected = None

    def load_best(self, stage: Stage) -> bool:
        """Load what a stage uses of the best model; False if it was not saved. Collective: call on every rank."""
        state = self.context.trainer.state
        folder = state.best_model_checkpoint
        if not self.context.topology.decide(lambda: has_weights(folder)):
            return False
        logger.info(f"Loading the best model from {folder} (score: {state.best_metric}).")
        self._load(folder, stage)
        return True

    def _load(self, folder: str, stage: Stage | None) -> None:
        names = None if stage is None else stage.own_names() | stage.own_buffers()
        self.context.topology.together(lambda: load_weights(self.context.trainer.model, folder, names))
