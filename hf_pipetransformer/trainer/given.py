"""What a trainer's constructor is called with, whatever the order of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_args

import torch
from transformers import Trainer, TrainingArguments

from hf_pipetransformer.arguments import PipeTransformerArguments, with_pipeline_options


@dataclass(frozen=True)
class Given:
    """A call of a trainer's constructor.

    Args:
        positional: what it gets by place.
        named: what it gets by name.
        args: `TrainingArguments` as a pipeline reads them; they are among the two.
        values: all that it gets, by the names of the parameters.
    """

    positional: list[Any]
    named: dict[str, Any]
    args: PipeTransformerArguments
    values: dict[str, Any]

    @property
    def model(self) -> torch.nn.Module | None:
        """The model; None where it is not known yet, as with trainers of TRL, which load one by its name."""
        if self.values.get("model") is None and self.values.get("model_init") is None:
            return _only_one(self.values, torch.nn.Module)
        model = self.values.get("model")
        return model if isinstance(model, torch.nn.Module) else None


def find_given(kind: type, mixin: type, positional: tuple[Any, ...], named: dict[str, Any]) -> Given:
    """The call of the constructor that follows a mixin, with arguments that have the pipeline's options.

    The arguments are those called `args`, else the only `TrainingArguments`; without any they get their defaults.

    Args:
        kind: a class of trainers.
        mixin: among its classes.
        positional: what the user gives by place.
        named: what the user gives by name.

    Raises:
        ValueError: the constructor takes no such arguments, or those of another class.
    """
    makers = list(_makers(kind, mixin))
    call, by_name = list(positional), dict(named)
    names = _names_by_place(makers)[: len(call)]
    values = {**dict(zip(names, call, strict=False)), **named}
    found = values.get("args")
    if not isinstance(found, TrainingArguments):
        found = _only_one(values, TrainingArguments) or found
    taken = with_pipeline_options(_checked(makers, found))
    if found is not None:
        call = [taken if value is found else value for value in call]
        by_name = {name: taken if value is found else value for name, value in named.items()}
    elif "args" in names:
        call[names.index("args")] = taken
    else:
        by_name["args"] = taken
    return Given(call, by_name, taken, values)


def check_handed_on(trainer: Trainer) -> None:
    """Refuse a trainer whose constructor gave Trainer other arguments than it was given."""
    args = trainer.args
    if not (isinstance(args, PipeTransformerArguments) and args.is_taken):
        raise ValueError(
            f"{type(trainer).__name__} has {type(args).__name__} that its constructor made anew, without the "
            "pipeline's options: hand the `args` that the constructor is given on to Trainer's, and set options there."
        )


def _makers(kind: type, mixin: type) -> Iterator[type]:
    """The classes after the mixin that have a constructor, up to Trainer."""
    order = kind.__mro__
    for each in order[order.index(mixin) + 1 : order.index(Trainer) + 1]:
        if "__init__" in vars(each):
            yield each


def _parameters(maker: type) -> list[Parameter]:
    """Of a constructor, without `self`."""
    return list(inspect.signature(vars(maker)["__init__"]).parameters.values())[1:]


def _names_by_place(makers: list[type]) -> list[str]:
    """Names of what is given by place; a constructor with `*rest` hands the rest on to the next one."""
    names = []
    for maker in makers:
        parameters = _parameters(maker)
        names += [each.name for each in parameters if each.kind <= Parameter.POSITIONAL_OR_KEYWORD]
        if all(each.kind is not Parameter.VAR_POSITIONAL for each in parameters):
            break
    return names


def _parameter_of_arguments(makers: list[type]) -> Parameter | None:
    """The parameter `args`; a constructor with `**others` hands it on to the next one."""
    for maker in makers:
        parameters = _parameters(maker)
        for each in parameters:
            if each.name == "args" and each.kind is not Parameter.VAR_POSITIONAL:
                return each
        if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters):
            break
    return None


def _checked(makers: list[type], args: TrainingArguments | None) -> TrainingArguments:
    """Refuse arguments that a trainer would make anew as those of its own, without the pipeline's options."""
    name, parameter = makers[0].__name__, _parameter_of_arguments(makers)
    if args is None and parameter is None:
        raise ValueError(
            f"{name} was given no TrainingArguments, and its constructor has no parameter `args`: the pipeline reads "
            "its options from them. Give the constructor a parameter `args`, and hand it on to Trainer's."
        )
    annotation = None if parameter is None else parameter.annotation
    kinds = [kind for kind in get_args(annotation) or (annotation,) if isinstance(kind, type)]
    # The class that is named first.
    kind = next((kind for kind in kinds if issubclass(kind, TrainingArguments)), TrainingArguments)
    if args is None:
        return kind(output_dir="tmp_trainer")
    if not isinstance(args, kind):
        raise ValueError(
            f"{name} takes {kind.__name__}, found {type(args).__name__}. Define a class with the options of both, "
            f"`@dataclass class Arguments({kind.__name__}, PipeTransformerArguments)`, or pass {kind.__name__}, which "
            "gets the defaults of the pipeline."
        )
    return args


def _only_one(values: dict[str, Any], kind: type) -> Any:
    """The only value of a kind; None where there is none, or several."""
    found = [value for value in values.values() if isinstance(value, kind)]
    return found[0] if len(found) == 1 else None
