"""Storing of what a script froze in a model that Trainer trains: computed once, and looked up from then on.

The first steps are watched, and nothing runs for it that would not run under Trainer, see `cache.frozen_parts`. The
prefix of a stack on pipeline stages has a cache of its own, see `cache.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_pipetransformer.cache.chain import settings_of
from hf_pipetransformer.cache.files import StoreDamagedError
from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, PresentStep
from hf_pipetransformer.cache.frozen_parts.served import Plan, Records
from hf_pipetransformer.cache.frozen_parts.serving import PartsRun, Price, ServingParts, Stores
from hf_pipetransformer.cache.frozen_parts.state import is_script_free
from hf_pipetransformer.cache.frozen_parts.unread import UnreadSamples
from hf_pipetransformer.cache.frozen_parts.watching import Watch
from hf_pipetransformer.data.batches import SampleBatch, batch_size
from hf_pipetransformer.data.rng import NotedDraws, States, random_state, same_states
from hf_pipetransformer.options.refusals import precision_of
from hf_pipetransformer.report import in_bytes
from hf_pipetransformer.splitters.adapters import adapted_tower, bare_model


class StoredParts:
    """Stores of the frozen parts of a model in one training; each of its batches runs inside `step`.

    Args:
        draws: True if random numbers are known to be drawn where samples are read.
    """

    def __init__(self, run: PartsRun, stores: Stores, draws: bool = False) -> None:
        self.run, self._stores, self._draws = run, stores, draws
        self.serving = ServingParts(run)
        self._say = self.serving.say
        self._watch: Watch | None = None
        self._step: PresentStep | None = None
        self._has_begun = False
        self._num_samples = 1
        self._first_epoch = 0
        self._has_told_beyond = self._has_found = False
        self._state: States | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._waiting: list[Plan] = []
        """Parts that may be stored, until it is known how often their inputs come again."""
        self.loader_draws: NotedDraws | None = None
        self._unread: UnreadSamples | None = None
        self.at_epoch_end = _ChecksEpochs(self)
        """For Trainer, before callbacks of the user's that may change a part when an epoch has ended."""

    @property
    def args(self) -> Any:
        return self.run.args

    @property
    def served(self) -> list[Records]:
        """Records of the parts that are looked up."""
        return self.serving.records

    @property
    def _parts(self) -> list[FrozenPart]:
        """Parts whose calls are watched, deferred or looked up."""
        watched = [] if self._watch is None else self._watch.parts
        chains = (part for records in self.served for part in records.plan.parts)
        return list({id(part): part for part in (*watched, *chains)}.values())

    @contextmanager
    def step(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Wrap a batch of the training. Collective where parts are still to be found.

        Raises:
            PlanPrinted: with `plan_only`, after the loss of the first batch.
        """
        self.begin_step()
        if self.has_parts:
            with self.batch(inputs, batch_size(named(inputs))):
                yield
        elif not self.args.plan_only:
            yield
        if self.args.plan_only:
            self.run.model.zero_grad()
            self._find()
            self._decide_on_found()
            self.run.end_plan()

    def begin_step(self) -> None:
        """Decide on what the step before has shown. Collective like `step`."""
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        if self._watch is not None and self._step is not None and self._state is not None:
            self._step.reads_at_random |= self._reads_at_random()
        self._find()
        self._decide_on_found()

    @property
    def has_parts(self) -> bool:
        """True if calls of some part are watched, deferred or looked up."""
        return self._step is not None and bool(self._parts)

    @contextmanager
    def batch(self, inputs: Mapping[str, Any], num_samples: int) -> Iterator[None]:
        """Check the parts, and let calls of them come to them from the first in a batch of training to its backward.

        Args:
            inputs: what is known of the batch; `enter_root` tells more.
        """
        step, watch = self._step, self._watch
        assert step is not None
        self.serving.check()
        step.evaluates = step.generates = step.reads_loss_alone = False
        if watch is not None:
            self._num_samples = max(1, num_samples)
            watch.begin_step()
        with self._looked_up(step, inputs):
            yield
        if watch is not None:
            watch.end_step()
        # Between two steps of an epoch, nobody but who reads samples draws random numbers, as a rule.
        self._state = random_state(self.args.device) if watch is not None else None

    def enter_root(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what the model itself is called with."""
        step = self._step
        if step is not None and step.defers:
            # Copies of the batch that DistributedDataParallel makes, or what a loss makes of it.
            step.note(named(*args, **kwargs))
        if self._watch is not None and step is not None and not step.evaluates:
            self._watch.enter_root(args, kwargs)

    def leave_root(self) -> None:
        """Note that a call of the model itself is over."""
        if self._watch is not None and self._step is not None and not self._step.evaluates:
            self._watch.leave_root()

    def _reads_at_random(self) -> bool:
        """Return True if random numbers were drawn since the step before, or in a process that reads samples."""
        draws = self.loader_draws is not None and self.loader_draws.seen
        if self._state is None or self.serving.present_epoch != self.serving.epoch:
            return draws
        return draws or not same_states(random_state(self.args.device), self._state)

    def following(self, loader: Any, may_be_unread: bool = False) -> Any:
        """Follow what a loader of the training reads: the random numbers that its processes draw, and its samples.

        Args:
            may_be_unread: True in a training if no code of the script's but data set and collator sees a batch before
                the model.
        """
        has_workers = bool(getattr(loader, "num_workers", 0))
        # Of a loader that accelerate has prepared, the one inside collates.
        inside = getattr(loader, "base_dataloader", loader)
        if self.args.activation_cache != "off" and has_workers and hasattr(inside, "collate_fn"):
            self.loader_draws = inside.collate_fn = NotedDraws(inside.collate_fn)
        is_alone = not self.run.topology.is_distributed and not self.args.plan_only
        is_stored = self.args.activation_cache != "off" and self.run.frozen
        # Compiled code takes no tensors without values.
        if may_be_unread and is_alone and is_stored and not self.args.torch_compile:
            self._unread = UnreadSamples(loader, self._say, lambda: self.run.state.global_step)
        return loader

    @contextmanager
    def evaluating(self, inputs: Mapping[str, Any], generates: bool, reads_loss_alone: bool) -> Iterator[None]:
        """Wrap a batch of an evaluation in the training."""
        if self._step is None or not self.served:
            yield
            return
        self.serving.notice_changed_weights()
        step = self._step
        step.evaluates, step.generates, step.reads_loss_alone = True, generates, reads_loss_alone
        with self._looked_up(step, inputs):
            yield

    @contextmanager
    def _looked_up(self, step: PresentStep, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Let calls of the parts come to them inside, and say if they read more than the first step did."""
        step.begin(named(inputs))
        step.fills = all(records.fills for records in self.served)
        for _, inside in inputs.pieces if isinstance(inputs, SampleBatch) else ():
            step.add(named(inside))
        with ExitStack() as stack:
            # An evaluation shows nothing of what training reads.
            for part in self._parts if not step.evaluates else (each for each in self._parts if each.watch is None):
                stack.enter_context(part.standing_in())
            yield
        if step.reads_beyond and not step.evaluates and not self._has_told_beyond:
            self._has_told_beyond = True
            names = ", ".join(sorted(step.reads_beyond))
            self._say(
                f"Step {self.run.state.global_step + 1} reads outputs of {names} that the first step did not, so "
                "that no record has them: they are computed where they are read."
            )

    def end_epoch(self, is_last: bool) -> None:
        """Check the parts, and see which samples need not be read in the next epoch."""
        self.serving.end_epoch(is_last)
        if self._unread is not None:
            self._unread.end_pass(bool(self.served) and is_script_free(self.run.model))

    def end(self) -> None:
        """Give the stores back, and say what was saved."""
        self.serving.end()
        self._has_begun, self._watch, self._step, self._unread = False, None, None, None
        self._waiting.clear()
        for hook in self._hooks:
            hook.remove()

    # ---- finding ----

    def _begin(self) -> None:
        model = bare_model(self.run.model)
        self._has_told_beyond = self._has_found = False
        if self.args.activation_cache == "off" or not self.run.is_whole or not (frozen := self.run.frozen):
            return
        if (adapted := adapted_tower(self.run.model)) is not None:
            name, others = adapted
            self._say(
                f"{name} is computed in every epoch, because adapters train it. It would be frozen, and computed "
                f"once, with target_modules=r'{others}'."
            )
        self._step = PresentStep(
            model,
            self.args.device,
            self.run.sends_buffers,
            defers=not self.args.torch_compile,
            reads_at_random=self._draws,
            # Trainer may make another loader in a training, to try a smaller batch.
            keys_of_read=lambda each: None if self._unread is None else self._unread.keys_of(each),
        )
        may_evaluate = self.args.activation_cache == "on"
        self._watch = Watch(
            model, frozen, self.run.model, self._step, precision_of(self.args), may_evaluate, self.args.plan_only,
            self.run.reads_loss_alone,
        )  # fmt: skip
        root: nn.Module = self.run.model
        self._hooks = (
            root.register_forward_pre_hook(RootHook(lambda _, *given: self.enter_root(*given)), with_kwargs=True),
            root.register_forward_hook(RootHook(lambda *_: self.leave_root()), always_call=True),
        )
        self._first_epoch = self.serving.present_epoch
        self.serving.begin()

    def _find(self) -> None:
        """Decide on the parts whose calls were seen. Collective while some are watched."""
        watch = self._watch
        if watch is None:
            return
        told = self.run.topology.gather(watch.called)
        agreed = set.intersection(*map(set, told))
        if agreed:
            found = self._agreed(watch.find(agreed))
            self._waiting += [plan for plan in found if plan.form is not None and plan.why_not is None]
            if self._waiting and not self._knows_passes:
                names = ", ".join(plan.name for plan in self._waiting)
                self._say(f"{names}: frozen. Without a length of the data set, the second pass stores what pays.")
            self._say_why_not([plan for plan in found if plan.why_not is not None])
            self._has_found |= bool(found)
        # A part that no batch of an epoch has called is watched no longer.
        if watch.is_over or self.serving.present_epoch > self._first_epoch:
            self._watch = None
            if not self._has_found and self.args.activation_cache == "on":
                self._say(
                    "activation_cache='on' stores nothing: no frozen part was seen to compute from the samples alone "
                    "and to take a share of the forward to speak of."
                )

    @property
    def _knows_passes(self) -> bool:
        """True if it is known how often samples come again."""
        return not self._stores.is_endless or self.serving.present_epoch > 0

    def _decide_on_found(self) -> None:
        """Decide on the parts that may be stored. Collective where there are some."""
        if self._waiting and (self._knows_passes or self.args.plan_only):
            for plan in self._waiting:
                self._decide(plan)
            self._waiting.clear()

    def _agreed(self, found: list[Plan]) -> list[Plan]:
        """Return the parts that all processes have found, with what holds for the samples of all. Collective."""
        told = self.run.topology.gather([[plan.name, plan.why_not, plan.key] for plan in found])
        by_name = [{name: rest for name, *rest in of_rank} for of_rank in told]
        own = {plan.name: plan for plan in found}
        agreed: list[Plan] = []
        # In rank 0's order on every rank, as what follows for each part is collective.
        for name in by_name[0]:
            if not all(name in of_rank for of_rank in by_name):
                continue
            facts = [of_rank[name] for of_rank in by_name]
            why_not = next((reason for reason, _ in facts if reason is not None), None)
            if why_not is None and len({key for _, key in facts}) > 1:
                why_not = "gives outputs that are read in other ways by other processes"
            own[name].why_not = why_not
            agreed.append(own[name])
        return agreed

    def _say_why_not(self, found: list[Plan]) -> None:
        by_reason: dict[tuple[str, bool], list[Plan]] = {}
        for plan in found:
            by_reason.setdefault((str(plan.why_not), plan.has_dropout), []).append(plan)
        for (reason, has_dropout), those in by_reason.items():
            more = f" and {len(those) - 1} more parts are" if len(those) > 2 else f" and {those[-1].name} are"
            text = f"{those[0].name}{more if len(those) > 1 else ' is'} frozen and computed as in Trainer in every "
            text += f"epoch: {'it' if len(those) == 1 else 'each'} {reason}."
            if has_dropout:
                text += (
                    " activation_cache='on' stores its outputs, computed in evaluation mode: other numbers, and "
                    f"{sum(each.share for each in those):.0%} of a forward less from the second epoch on."
                )
            self._say(text)

    # ---- deciding ----

    def _decide(self, plan: Plan) -> None:
        """Store a part if that pays. Collective."""
        form = plan.form
        assert form is not None
        topology, settings = self.run.topology, settings_of(bare_model(self.run.model), self.args)

        def priced() -> dict[str, Any] | str:
            try:
                return vars(self._stores.price(form, self._num_samples))
            except (OSError, ValueError, StoreDamagedError) as error:
                return str(error)

        # One price for all: a part that only some processes store would leave the others waiting.
        answer = topology.gather(priced() if topology.rank == 0 else None)[0]
        if isinstance(answer, str):
            self._say_computed(plan.name, answer)
            return
        price = Price(**answer)
        if self.args.plan_only:
            self._say_price(plan.name, price)
        elif not price.is_used and self.args.activation_cache == "on":
            self._say_computed(plan.name, f"{price.reason}.")
        if not price.is_used or self.args.plan_only:
            return
        store = self._stores.open(plan, form, price, settings)
        if isinstance(store, str):
            self._say_computed(plan.name, store)
            return
        self.serving.add(Records(plan, store, settings, precision_of(self.args), self.serving.say_wrong))
        # Before another process of the node adds records, which would be taken for those of an earlier run.
        num_found = max(topology.gather(len(store)))
        self.run.note(what="part", part=plan.name, **vars(price))
        mode = " in evaluation mode, without dropout" if any(part.in_evaluation for part in plan.parts) else ""
        self._say(
            f"{plan.name} ({plan.size / 1e6:,.3g} million parameters) is frozen: it is computed once{mode}. Its "
            f"outputs are stored ({in_bytes(price.record_bytes)} each, {in_bytes(price.needed_bytes)} in all) and "
            f"read from the {'next' if self.serving.present_epoch else 'second'} epoch on."
        )
        if num_found:
            self._say(f"{plan.name}: {num_found} outputs of an earlier run serve the same inputs and attributes.")

    def _say_price(self, name: str, price: Price) -> None:
        what = "would be stored" if price.is_used else "would be computed as in Trainer in every epoch"
        self._say(
            f"{name} is frozen. Its outputs ({in_bytes(price.record_bytes)} each, {in_bytes(price.needed_bytes)} "
            f"in all) {what}: {price.reason}."
        )

    def _say_computed(self, name: str, reason: str) -> None:
        self._say(f"{name} is frozen and computed as in Trainer in every epoch: {reason}")


def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what a model is called with, or a batch of any kind, in one dict; entries of a dict have their names."""
    found: dict[str, Any] = {}
    for place, each in enumerate(args):
        found.update(each if isinstance(each, Mapping) else {str(place): each})
    for name, each in [*found.items(), *kwargs.items()]:
        if isinstance(each, (Mapping, list, tuple)):
            inside = named(each) if isinstance(each, Mapping) else named(*each)
            found.update((f"{name}.{key}", value) for key, value in inside.items())
        else:
            found[name] = each
    return found


class RootHook:
    """Hook on a model that is not saved or copied with it."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __reduce__(self) -> Any:
        return RootHook, (_do_nothing,)


def _do_nothing(*_: Any) -> None: ...


class _ChecksEpochs(TrainerCallback):
    """Checks the parts when an epoch has ended."""

    def __init__(self, parts: StoredParts) -> None:
        self._parts = parts

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._parts.end_epoch(control.should_training_stop)
