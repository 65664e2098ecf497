"""Generation on several stages: transformers' own `generate` runs on every rank of a pipeline, in lock-step, and its
forwards run the new tokens through the stages.

All policy stays with transformers: processors of logits, stopping criteria, greedy choice and sampling. They see the
same logits on every rank and draw the same random numbers, so they choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch.nn.functional import pad
from transformers import Cache, GenerationConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.transfers import all_gather_trees, broadcast, broadcast_tree, digest_of
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.rng import drawing_alike
from hf_pipetransformer.engine.engine import Engine
from hf_pipetransformer.engine.losses import LossRule
from hf_pipetransformer.engine.program import TokenSpan
from hf_pipetransformer.runtime.execution import LoaderBatch
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import media_of
from hf_pipetransformer.splitters.view import overriding_forwards


if TYPE_CHECKING:
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.execution import StageRunner
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.schedules.actions import ActionList


_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers of which keys and values are all that later tokens need."""
_FILLING_TOKENS = 256
"""Number of tokens from which on a forward takes longer with more of them, and not only to read the weights."""
_OF_TEXT = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""Inputs of a prompt that may be cut into token slices."""
_CACHE_NAMES = ("cache", "past_key_values")
"""What a cache is called as an argument of `generate`, up to transformers 5.23 the second."""


def settings_of(model: Any, options: dict[str, Any]) -> GenerationConfig:
    """Return the settings that a transformers model's `generate` will use with these keyword arguments."""
    if not hasattr(model, "_prepare_generation_config"):
        raise ValueError(
            f"{type(model).__name__} cannot generate: expected a causal language model, such as one that "
            "AutoModelForCausalLM loads."
        )
    others = dict(options)
    # Only this method knows how the model's defaults and those of the call go together.
    settings: GenerationConfig = model._prepare_generation_config(others.pop("generation_config", None), **others)[0]
    return settings


def check_generation(model: Any, settings: GenerationConfig, options: dict[str, Any]) -> None:
    """Raise if several stages cannot generate with these settings.

    Args:
        options: keyword arguments of `generate`.

    Raises:
        ValueError: names what they cannot do, and the remedy.
    """
    mode = settings.get_generation_mode(options.get("assistant_model"))
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    others = ", ".join(sorted({*kinds} - _ATTENTION)) or type(model).__name__
    is_stateful = bool({*kinds} - _ATTENTION) or getattr(model, "_is_stateful", False)
    num_sharing = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    found = [
        (media_of(model) is not None, f"{type(model).__name__} takes images, videos or sounds beside tokens"),
        (model.config.is_encoder_decoder, f"{type(model).__name__} has an encoder and a decoder"),
        (is_stateful, f"layers keep a state beside keys and values ({others})"),
        (bool(num_sharing), f"{num_sharing} layers read keys and values of layers that may be on another stage"),
        (mode not in _MODES, f"{mode.value} reorders or takes back what the stages have cached"),
        (
            settings.cache_implementation not in (None, "dynamic"),
            f"cache_implementation={settings.cache_implementation!r}, and the stages have a cache of their own",
        ),
        (settings.max_time is not None, f"max_time={settings.max_time}, and each rank has its own clock"),
        (
            settings.guidance_scale not in (None, 1),
            f"guidance_scale={settings.guidance_scale} calls the model twice for a token",
        ),
        (
            bool(settings.output_attentions or settings.output_hidden_states),
            "output_attentions and output_hidden_states are those of all layers",
        ),
    ]
    given = (*_CACHE_NAMES, "inputs_embeds", "custom_generate")
    found += [(options.get(name) is not None, f"{name} is the caller's own") for name in given]
    reason = next((reason for is_so, reason in found if is_so), None)
    if reason is not None:
        raise ValueError(
            f"Several stages cannot generate so: {reason}. They choose token by token, the best one or a random one "
            "(num_beams=1). Call trainer.model.generate within trainer.whole_model(), where the whole model fits."
        )


def generate_in_stages(pipeline: Pipeline) -> None:
    """Give the model a `generate` that runs through its stages while they are installed."""
    model = bare_model(pipeline.shell.module)
    if hasattr(model, "generate"):
        pipeline.stage.view.methods["generate"] = StagedGeneration(pipeline, model)


class StagedGeneration:
    """The method `generate` of a transformers model whose stages are installed. Collective on a pipeline's ranks."""

    def __init__(self, pipeline: Pipeline, model: Any) -> None:
        self.pipeline = pipeline
        self.model = model
        self.original = model.generate

    def __call__(
        self, inputs: Any = None, generation_config: GenerationConfig | None = None, *others: Any, **options: Any
    ) -> Any:
        """Return what the whole model's `generate` would, on every rank of the pipeline.

        Raises:
            ValueError: stages cannot generate so, or ranks of the pipeline were given different inputs.
            PipelineError: the ranks have chosen different tokens.
        """
        stage = self.pipeline.stage
        if stage.layout.pipeline_size == 1:
            return self.original(inputs, generation_config, *others, **options)
        if inputs is not None:
            options["input_ids"] = inputs
        settings = settings_of(self.model, {**options, "generation_config": generation_config})
        check_generation(self.model, settings, options)
        groups, device = stage.groups, stage.settings.device
        rank, control = stage.settings.topology.rank, groups.pipeline_control

        def of_first(value: Any) -> Any:
            return broadcast_tree(value, groups.pipeline_ranks[0], control, rank)

        own = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        # Other ranks may have placeholders for the inputs, as loaders give them.
        shared = of_first(own)
        differing = sorted({*own} ^ {*shared} | {name for name in shared if not _agree(own.get(name), shared[name])})
        # All raise if one finds a difference, or the rest would wait for it in the passes.
        for names in all_gather_trees(differing, control, groups.pipeline_size):
            if names:
                raise ValueError(
                    f"generate() was given another {names[0]} on some ranks of one pipeline than on its first: give "
                    "the same inputs to all of them, or all inputs to trainer.generate on every rank."
                )
        options |= send_to_device(shared, device)
        passes = Passes(self.pipeline.runner, self.pipeline.shell)
        # The greedy choice draws nothing, so that no states of generators need be exchanged for it.
        draws = drawing_alike(of_first, device) if settings.do_sample else nullcontext()
        with draws, passes.replacing_forward(self.model):
            result = self.original(None, generation_config, *others, **options)
        tokens = result if isinstance(result, torch.Tensor) else result.sequences
        # Once, at the end: in each pass all ranks would wait for it.
        if len(set(all_gather_trees(digest_of(tokens), control, groups.pipeline_size))) > 1:
            raise PipelineError(
                "Ranks of one pipeline have generated different tokens from the same logits: a logits processor or "
                "stopping criterion of the script differs between processes, or reads a clock."
            )
        return result


def join_tokens(parts: list[torch.Tensor], settings: GenerationConfig) -> torch.Tensor:
    """Join the tokens that replicas have generated, `(rows, tokens)` each, padded as `generate` pads rows that end."""
    filler, ends = settings.pad_token_id, settings.eos_token_id
    if filler is None:
        # As `generate` does without a token for padding.
        filler = ends[0] if isinstance(ends, list) else ends or 0
    longest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, longest - part.shape[1]), value=filler) for part in parts if len(part)])


def _agree(own: torch.Tensor | None, shared: torch.Tensor) -> bool:
    """Return True if a rank's own input is the shared one, or a loader's placeholder for it, zeros."""
    if own is None or own.shape != shared.shape:
        return False
    return not own.any() or torch.equal(own.cpu(), shared.cpu())


class Passes:
    """Passes of one generation through the stages, each over the next tokens of all sequences.

    Each stage keeps the keys and values of its own layers. `forward` runs a stage's part of the model.
    """

    def __init__(self, runner: StageRunner, forward: Callable[..., Any]) -> None:
        from hf_pipetransformer.engine.token_program import TokenSliceProgram

        self.runner = runner
        self._forward = forward
        stage = runner.stage
        programs = [TokenSliceProgram(program, stage.layout.num_layers) for program in stage.engine.programs]
        # An engine of its own, as keys and values are kept for the generation only.
        self._engine = Engine(programs, stage.engine.links, stage.engine.meter)
        self._run = self._engine.begin((), ())
        self._num_kept = 0
        self._size: int | None = None
        self._dtype = torch.float32

    @contextmanager
    def replacing_forward(self, model: Any) -> Iterator[None]:
        """Run the forwards of `model` as passes inside, except those that the stages call for their own part."""
        original = model.forward

        @wraps(original)  # `generate` reads the signature.
        def forward(*args: Any, **inputs: Any) -> Any:
            if self.runner.stage.view.is_running:
                return original(*args, **inputs)
            return self._pass(inputs)

        try:
            with overriding_forwards([(model, forward)]):
                yield
                self._run.drain()
        finally:
            # The keys and values would stay until the next batch.
            self._engine.begin((), ())

    def _pass(self, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        """Return the logits of the last token of each sequence, `(batch, 1, vocabulary)`, on every rank.

        Collective: call on every rank of the pipeline.
        """
        # Transformers' cache stays empty: it is passed as long as keys and values are to be kept. It is found by its
        # type, as its name differs between releases: one that is not found would give wrong tokens without an error.
        cache = {name: value for name, value in inputs.items() if isinstance(value, Cache)}
        assert cache or not inputs.get("use_cache"), f"no cache among {sorted(inputs)}"
        stage = self.runner.stage
        inputs = send_to_device({name: inputs[name] for name in inputs if name not in cache}, stage.settings.device)
        actions, parts = self._cut(inputs, self._num_kept if cache else None)
        num_rows, num_new = inputs[self.runner.activation.main_input].shape
        self._num_kept += num_new
        self._run.extend(actions, parts)
        self._run.advance()
        results = zip(parts, self._run.take_results(), strict=False)  # There are none but on the last stage.
        stage.view.widen()
        # The last slice of each group of rows has the last token.
        last = [logits for part, logits in results if part.place is None or part.place.stop == self._num_kept]
        return CausalLMOutputWithPast(logits=self._spread(last, num_rows), **cache)

    def _cut(self, inputs: dict[str, Any], num_kept: int | None) -> tuple[ActionList, list[MicroBatch]]:
        """Cut the next tokens, `(batch, tokens)`, into the micro-batches of a pass.

        Those of one group of rows keep keys and values from pass to pass, so far those of `num_kept` tokens; None to
        keep none. Prompts are cut into token slices, as later tokens of all rows are one micro-batch unless there are
        very many: a stage takes as long for one row as for several.
        """
        runner, layout = self.runner, self.runner.stage.layout
        num_rows, num_new = inputs[runner.activation.main_input].shape
        # With four parts a stage, filling and emptying the pipeline take at most about a fifth of the pass. Each
        # further part costs the launches of a whole stage.
        most = 4 * layout.num_stages
        count = max(1, min(most, num_rows // _FILLING_TOKENS))
        per_group = num_rows * num_new // count
        # What else is given may belong to places of the prompt, or have tokens read later ones.
        has_text_alone = not any(
            isinstance(value, torch.Tensor) for name, value in inputs.items() if name not in _OF_TEXT
        )
        is_cut = num_kept == 0 and has_text_alone
        num_slices = max(1, min(most, num_new, per_group // _FILLING_TOKENS)) if is_cut else 1
        bounds = [num_new * number // num_slices for number in range(num_slices + 1)]
        batch = LoaderBatch(SampleBatch(inputs), self._last_logits, num_rows)
        cut = runner.cut(batch, LossRule.MEAN, count, bounds if num_slices > 1 else ())
        if num_kept is None:
            return runner.forwards(len(cut)), [replace(part, is_predicted=True) for part in cut]
        parts = []
        for part in cut:
            own = part.place or TokenSpan(part.index, 0, num_new, None)
            place = TokenSpan(own.batch_slice, num_kept + own.start, num_kept + own.stop, None)
            parts.append(replace(part, place=place, is_predicted=True))
        return runner.forwards(len(parts)), parts

    def _last_logits(self, inputs: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = self._forward(**inputs).logits[:, -1:]
        return logits

    def _spread(self, found: list[torch.Tensor], num_rows: int) -> torch.Tensor:
        """Broadcast the logits of the last stage's micro-batches."""
        stage, groups = self.runner.stage, self.runner.stage.groups
        logits = torch.cat(found).contiguous() if groups.is_last else torch.empty(0)
        # Told once, since width and dtype of the logits stay the same in a generation.
        if self._size is None:
            told = [logits.shape[-1], str(logits.dtype).removeprefix("torch.")]
            rank = stage.settings.topology.rank
            self._size, name = broadcast_tree(told, groups.last_rank, groups.pipeline_control, rank)
            self._dtype = getattr(torch, name)
        if not groups.is_last:
            logits = torch.empty((num_rows, 1, self._size), dtype=self._dtype, device=stage.settings.device)
        broadcast(logits, groups.last_rank, groups.pipeline_group, "the logits")
        return logits
