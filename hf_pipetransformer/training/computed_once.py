"""Storing of what a script froze in a model that Trainer trains: computed once, and looked up from then on.

The prefix of a stack on pipeline stages has a cache of its own, see `cache.training`; here are towers, encoders and
feature extractors of models whose forward runs as it is, and all of a model below a trained head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, set_seed

from hf_pipetransformer.cache.chain import settings_of
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.frozen_parts.contents import record_format
from hf_pipetransformer.cache.frozen_parts.served import Circumstances, ServedPart
from hf_pipetransformer.cache.frozen_parts.trial import Found, Trial, maximal_frozen
from hf_pipetransformer.cache.frozen_parts.values import Rows, tensors_of
from hf_pipetransformer.cache.opening import stored_dtype
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.data.batches import batch_size, take_samples
from hf_pipetransformer.engine.effects import Alone, buffers_kept
from hf_pipetransformer.options.refusals import precision_of
from hf_pipetransformer.report import announce, in_bytes
from hf_pipetransformer.splitters.adapters import adapted_tower, bare_model
from hf_pipetransformer.training.part_stores import PartStores, Price
from hf_pipetransformer.training.traces import leaving_no_trace


if TYPE_CHECKING:
    from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, Reading
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.training.context import TrainingContext


NUM_TRIED = 4
"""Samples that the model is tried on."""


class ComputedOnce:
    """Stores of the frozen parts of a model in one training; `begin_step` comes before each of its batches."""

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self.trainer = context.trainer
        self._serving: list[tuple[ServedPart, Price]] = []
        self._is_tried = False
        self._epoch = -1
        self._checked_at = 0
        self._does_for_evaluation: Callable[[Reading], bool] = lambda reading: False
        self._at_end = _ChecksEpochs(self)
        self._stores = PartStores(context, lambda: sum(served.store.bytes_taken for served in self.served))

    @property
    def args(self) -> PipeTransformerArguments:
        return self.context.args

    @property
    def served(self) -> list[ServedPart]:
        """Parts that are looked up."""
        return [served for served, _ in self._serving]

    def begin_step(self, inputs: Mapping[str, Any]) -> None:
        """Find the parts before the first batch, and check them before later ones. Collective in the first batch.

        Raises:
            PlanPrinted: with `plan_only`, after the parts were found.
            ValueError: a part was changed unseen, and batches since the last check may have read records of before.
        """
        if not self._is_tried:
            self._is_tried = True
            self._begin(inputs)
            if self.args.plan_only:
                self.context.end_plan()
        elif self._serving:
            self._check()

    def end_step(self, inputs: Mapping[str, Any], loss: torch.Tensor) -> None:
        """Look if the loss of a step has read what is not stored, which is nan.

        Raises:
            ValueError: it has; no optimizer step was made of it.
        """
        partly = [served.part for served in self.served if not served.part.reading.is_whole]
        # Trainer itself looks at each step's loss, so that this waits for nothing more.
        if not partly or not loss.isnan():
            return
        # Computed once more with all parts: the loss may be nan for reasons of its own.
        with leaving_no_trace(self.trainer), buffers_kept(self.trainer.model), ExitStack() as stack:
            for served in self.served:
                stack.enter_context(served.part.computed())
            stack.enter_context(torch.no_grad())
            computed = self._loss_of(trainer_compat.preparation(self.trainer)(dict(inputs)))()
        if not computed[0].isnan():
            names = ", ".join(part.name for part in partly)
            raise ValueError(
                f"The loss of step {self.trainer.state.global_step + 1} reads outputs of {names} that the first batch "
                "did not read, so that no record has them. Set activation_cache='off', or freeze and read them in "
                "the same way in all steps."
            )

    @contextmanager
    def evaluating(self, generates: bool, reads_loss_alone: bool) -> Iterator[None]:
        """Serve evaluations inside, after noticing weights that were changed since the last step.

        With `generates`, only parts whose records have all of their outputs: what generation reads was not tried.
        Outputs of the model that hold what a part has no record of are as good as any where they are not read.
        """
        self._notice_changed_weights()
        self._look_again()
        # Evaluations nest: `compute_metrics` may start another one.
        before = self._does_for_evaluation
        self._does_for_evaluation = lambda reading: (
            not generates and (reading.does_for_losses if reads_loss_alone else reading.does_for_evaluations)
        )
        try:
            yield
        finally:
            self._does_for_evaluation = before

    def end_epoch(self) -> None:
        """Check the parts, and write down for the report what this process has read and computed in the epoch."""
        self.check_thoroughly()
        counts = [served.counts_since_report() for served in self.served]
        hits, misses = sum(each.hits for each in counts), sum(each.misses for each in counts)
        stored = sum(served.store.bytes_stored for served in self.served)
        self.context.journal.write("cache", what="epoch", hits=hits, misses=misses, bytes_stored=stored)

    def end(self) -> None:
        """Let the modules run their own forward again, and say what was saved."""
        for served, price in self._serving:
            served.end(self._stores.use(served.part))
            counts = served.part.counts
            looked_up = counts.hits + counts.misses
            if looked_up:
                where = " by this process" if self.context.topology.is_distributed else ""
                self._say(
                    f"{served.part.name}: {counts.hits} of {looked_up} outputs were read instead of computed{where} "
                    f"({counts.hits / looked_up:.0%}), which saved about {counts.hits * price.hit_seconds:,.0f} s."
                )
        self._serving.clear()
        if self._at_end in self.trainer.callback_handler.callbacks:
            self.trainer.remove_callback(self._at_end)
        self._is_tried = False

    # ---- finding ----

    def _begin(self, inputs: Mapping[str, Any]) -> None:
        model = bare_model(self.trainer.model)
        # Others run copies or parts of the modules.
        is_whole = self.args.n_gpu <= 1 and not (self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled)
        if self.args.activation_cache == "off" or not is_whole or not maximal_frozen(model):
            return
        if (adapted := adapted_tower(self.trainer.model)) is not None:
            name, others = adapted
            self._say(
                f"{name} is computed in every epoch, because adapters train it. It would be frozen, and computed "
                f"once, with target_modules=r'{others}'."
            )
        num_samples = min(NUM_TRIED, batch_size(inputs))
        trial, found, error = None, list[Found](), None
        try:
            with leaving_no_trace(self.trainer), buffers_kept(model):
                trial = self._trial(take_samples(inputs, slice(0, num_samples)), model)
                found = trial.find()
        # Models and losses of users may fail on a few samples in any way; Trainer's own step says so if it fails too.
        except Exception as raised:
            error = f"trying them raised {type(raised).__name__}: {raised}"
        # An error on one process keeps all from storing: what follows is collective, and must be the same on all.
        error = next((told for told in self.context.topology.gather(error) if told is not None), None)
        if error is not None or trial is None:
            self._say(f"Frozen parts are computed as in Trainer: {error}")
            return
        found = self._agreed(found)
        if not found and self.args.activation_cache == "on":
            self._say(
                "activation_cache='on' stores nothing: no frozen part computes from the samples alone and takes a "
                "share of the forward to speak of."
            )
        for each in found:
            if each.why_not is not None:
                self._say_why_not(each, trial)
            else:
                self._decide(each, trial, num_samples)
        self._epoch, self._checked_at = self._present_epoch, self.trainer.state.global_step
        if self._serving:
            # Before the user's own, which may change a part when an epoch has ended.
            self.trainer.callback_handler.callbacks.insert(0, self._at_end)

    @property
    def _is_data_parallel(self) -> bool:
        return isinstance(self.trainer.model_wrapped, DistributedDataParallel)

    def _trial(self, inputs: dict[str, Any], model: nn.Module) -> Trial:
        given = trainer_compat.preparation(self.trainer)(inputs)
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        may_evaluate = self.args.activation_cache == "on"
        return Trial(model, self._loss_of(given), tensors, precision_of(self.args), may_evaluate)

    def _loss_of(self, given: dict[str, Any]) -> Callable[[], tuple[torch.Tensor, Any]]:
        """Return what computes loss and outputs of samples on the device, each time with the same random numbers."""
        trainer, is_distributed = self.trainer, self.context.topology.is_distributed
        passes = trainer_compat.takes_num_items(trainer) and "labels" in given
        items = torch.tensor(trainer_compat.items_of(trainer, given), device=self.args.device) if passes else None
        # DistributedDataParallel waits for the backward of each forward.
        tried = trainer.model if self._is_data_parallel else trainer.model_wrapped

        def run() -> tuple[torch.Tensor, Any]:
            # The same dropout masks in each run, so that outputs that differ were computed otherwise.
            set_seed(self.args.seed)
            # Processes do not try in step, so that a loss which waits for others is refused here.
            with Alone() if is_distributed else nullcontext(), trainer.compute_loss_context_manager():
                return trainer.compute_loss(tried, dict(given), return_outputs=True, num_items_in_batch=items)

        return run

    def _agreed(self, found: list[Found]) -> list[Found]:
        """Return the parts that all processes have found, with what holds for the samples of all. Collective."""
        told = self.context.topology.gather(
            [[each.part.name, each.why_not, each.part.reading.cuts_padding, each.part.description] for each in found]
        )
        by_name = [{name: rest for name, *rest in of_rank} for of_rank in told]
        own = {each.part.name: each for each in found}
        agreed: list[Found] = []
        # In rank 0's order on every rank, as what follows for each part is collective.
        for name in by_name[0]:
            if not all(name in of_rank for of_rank in by_name):
                continue
            each, facts = own[name], [of_rank[name] for of_rank in by_name]
            why_not = next((reason for reason, *_ in facts if reason is not None), None)
            if why_not is None and len({description for *_, description in facts}) > 1:
                why_not = "gives outputs that are read in other ways by other processes"
            cuts_padding = all(cuts for _, cuts, _ in facts)
            each.part.reading = replace(each.part.reading, cuts_padding=cuts_padding)
            agreed.append(replace(each, why_not=why_not))
        return agreed

    def _say_why_not(self, found: Found, trial: Trial) -> None:
        share = found.seconds * found.rows / trial.seconds if trial.seconds else 0.0
        text = f"{found.part.name} is frozen and computed as in Trainer in every epoch: it {found.why_not}."
        if found.has_dropout:
            text += (
                " activation_cache='on' stores its outputs, computed in evaluation mode: other numbers, and "
                f"{share:.0%} of a forward less from the second epoch on."
            )
        self._say(text)

    # ---- deciding ----

    def _decide(self, found: Found, trial: Trial, num_samples: int) -> None:
        """Store a part if that pays. Collective."""
        part, topology = found.part, self.context.topology
        rows = Rows.of(found.call.args, found.call.kwargs, part.reading.cuts_padding)
        records = part.reading.records(tensors_of(found.call.output), rows)
        around = Circumstances(
            settings_of(bare_model(self.trainer.model), self.args),
            precision_of(self.args),
            self.trainer.compute_loss_context_manager,
            buffers_are_sent=self._is_data_parallel,
        )

        try:
            content = record_format(records.shape[2], stored_dtype(self.args, records.dtype))
        except ValueError as error:
            self._say_computed(part, str(error))
            return

        def priced() -> dict[str, Any] | str:
            try:
                return vars(self._stores.price(found, trial, num_samples, rows, content, records.shape[1]))
            except (OSError, ValueError, StoreDamagedError) as error:
                return str(error)

        # One price for all: a part that only some processes store would leave the others waiting.
        answer = topology.decide(priced)
        if isinstance(answer, str):
            self._say_computed(part, answer)
            return
        price = Price(**answer)
        if self.args.plan_only:
            self._say_price(part, price)
        if not price.is_used or self.args.plan_only:
            return
        store = self._stores.open(part, content, price, around)
        if isinstance(store, str):
            self._say_computed(part, store)
            return
        part.is_read_as_tried = partial(self._is_read_as_tried, part)
        self._serve(ServedPart(part, store, rows, around), price)

    def _serve(self, served: ServedPart, price: Price) -> None:
        part = served.part
        served.begin()
        self._serving.append((served, price))
        self.context.journal.write("cache", what="part", part=part.name, **vars(price))
        size = sum(parameter.numel() for parameter in part.modules.parameters())
        mode = " in evaluation mode, without dropout" if part.in_evaluation else ""
        self._say(
            f"{part.name} ({size / 1e6:,.3g} million parameters) is frozen: it is computed once{mode}. Its outputs "
            f"are stored ({in_bytes(price.record_bytes)} each, {in_bytes(price.needed_bytes)} in all) and read from "
            f"the second epoch on: about {price.speedup:.1f} times as fast then."
        )
        if num_found := len(served.store):
            self._say(f"{part.name}: {num_found} outputs of an earlier run are used where inputs are the same.")

    def _say_price(self, part: FrozenPart, price: Price) -> None:
        what = "would be stored" if price.is_used else "would be computed as in Trainer in every epoch"
        self._say(
            f"{part.name} is frozen. Its outputs ({in_bytes(price.record_bytes)} each, {in_bytes(price.needed_bytes)} "
            f"in all) {what}: {price.reason}. A step that reads them is expected to be {price.speedup:.1f} times as "
            "fast."
        )

    def _say_computed(self, part: FrozenPart, reason: str) -> None:
        self._say(f"{part.name} is frozen and computed as in Trainer in every epoch: {reason}")

    def _is_read_as_tried(self, part: FrozenPart) -> bool:
        return bool(self.trainer.model.training) or self._does_for_evaluation(part.reading)

    # ---- checking ----

    @property
    def _present_epoch(self) -> int:
        return int(self.trainer.state.epoch or 0)

    def _check(self) -> None:
        self._notice_changed_weights()
        if self._present_epoch != self._epoch:
            self.check_thoroughly()
            self._look_again()
            self._epoch = self._present_epoch
            for served in self.served:
                self._stop_if_useless(served)

    def _look_again(self) -> None:
        for served in self.served:
            # A process alone knows all records, for it has written them itself or found them when it opened the store.
            if self.context.topology.is_distributed:
                served.store.look_again()

    def _notice_changed_weights(self) -> None:
        for served in self.served:
            # `_stop` takes parts out of `_serving`, not out of the list that this loop goes through.
            if served.is_trained:
                self._say(f"{served.part.name} is not frozen any more: it is computed as in Trainer from here on.")
                self._stop(served)
            elif served.have_weights_changed():
                self._say(f"Weights of {served.part.name} were changed from outside: its outputs are computed again.")

    def check_thoroughly(self) -> None:
        """Check all bytes of the parts' weights, and what they compute, at the begin and the end of an epoch.

        Raises:
            ValueError: a part was changed unseen, and batches since the last check may have read records of before.
        """
        for served in self.served:
            has_served = served.has_served_since_check()
            if not served.is_what_it_was():
                if has_served:
                    step = self.trainer.state.global_step
                    raise ValueError(
                        f"Steps {self._checked_at + 1} to {step} may have used stored outputs of {served.part.name} "
                        "that do not hold any more: it computes something else now, and no version counter shows it "
                        "(a write past autograd, a hook, another module or an attribute). Change it between epochs "
                        "(on_epoch_begin), write with parameter.copy_() under torch.no_grad(), or set "
                        "activation_cache='off'."
                    )
                self._say(f"{served.part.name} was changed from outside: its outputs are computed again.")
                served.distrust()
        self._checked_at = self.trainer.state.global_step

    def _stop_if_useless(self, served: ServedPart) -> None:
        """End the storing of a part none of whose inputs came again in a whole epoch."""
        counts = served.part.counts
        # Epoch 0 only writes, so hits must have come by the end of epoch 1 if inputs come again at all.
        if self._epoch < 2 or counts.hits or not counts.misses:
            return
        self._say(
            f"{served.part.name} is computed from here on: none of its inputs came a second time (random "
            "augmentation?), so nothing is stored any more."
        )
        self._stop(served)

    def _stop(self, served: ServedPart) -> None:
        served.end(self._stores.use(served.part))
        self._serving = [each for each in self._serving if each[0] is not served]

    def _say(self, text: str) -> None:
        if self.context.topology.rank == 0:
            announce(text)


class _ChecksEpochs(TrainerCallback):
    """Checks the parts when an epoch has ended."""

    def __init__(self, computed_once: ComputedOnce) -> None:
        self._computed_once = computed_once

    def on_epoch_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._computed_once.end_epoch()
