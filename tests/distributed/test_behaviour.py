"""What the layout must not change, beside the product of cases of `test_equality`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTModel, set_seed
from transformers.trainer_pt_utils import EvalLoopContainer

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.comm.topology import get_topology
from hf_pipetransformer.runtime import execution
from hf_pipetransformer.runtime.wiring import send_model_from_first_rank
from tests.distributed.scenarios import RANK, run, scenario
from tests.support.comparison import untimed
from tests.support.models import QA_LENGTH, build_model, collate, make_dataset, make_rows
from tests.support.trainings import losses_of, our_arguments, plain_arguments


NUM_SAMPLES = 53
METRICS = ("eval_loss", "eval_count", "eval_sharpness")


def pad_to_the_longest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`collate` without the fixed length that it gives question answering."""
    batch = collate(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    assert longest <= QA_LENGTH
    return {key: value[:, :longest] if value.dim() == 2 else value for key, value in batch.items()}


class EveryThird(PipeTransformerTrainer):
    """A trainer whose user evaluates on a part of the data set only."""

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(range(3))


class Taught:
    """A user's `compute_loss`: in training a teacher looks at the images too."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        if self.model.training:
            wanted = 30 * inputs["pixel_values"].mean(dim=(-2, -1))
            loss = loss + torch.nn.functional.mse_loss(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


class TaughtTrainer(Taught, Trainer):
    pass


class TaughtPipeTransformerTrainer(Taught, PipeTransformerTrainer):
    pass


class SharpTrainer(TaughtTrainer):
    """A trainer of somebody else's: another loss, and predictions that are sharper than the model's."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, None if logits is None else 3 * logits, labels


class SharpPipelineTrainer(PipeTransformerMixin, SharpTrainer):
    pass


@scenario
def losses(folder: Path, kind: str, model: str, num_stages: str = "2", change: str = "") -> dict[str, Any]:
    """Losses and metrics of the trainer of one `kind`, `plain` or `ours`.

    Changes: `pad_to_the_longest`; `predict_first`, without labels before training; `evaluate_three`, with a sampler of
    three samples; `taught`, a loss that reads the images; `sharp`, somebody else's trainer.
    """
    set_seed(0)
    common: dict[str, Any] = {
        "max_steps": 20, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 1,
        "gradient_accumulation_steps": 2 if change == "predict_first" else 1,
    }  # fmt: skip
    data: dict[str, Any] = {
        "train_dataset": make_dataset(model, NUM_SAMPLES),
        "eval_dataset": make_dataset(model, 10, seed=1),
        "data_collator": pad_to_the_longest if change == "pad_to_the_longest" else collate,
        "compute_metrics": lambda prediction: {
            "count": len(prediction.label_ids),
            "sharpness": float(abs(prediction.predictions).mean()),
        },
    }
    built = build_model(model)
    if kind == "plain":
        arguments = plain_arguments(folder, **common)
        plain_class = SharpTrainer if change == "sharp" else TaughtTrainer if change == "taught" else Trainer
        trainer = plain_class(built, arguments, **data)
        trainer.model_accepts_loss_kwargs = model == "vit"
    else:
        args = our_arguments(folder, num_stages, pipeline_parallel_num_microbatches="2", **common)
        trainer_class = EveryThird if change == "evaluate_three" else PipeTransformerTrainer
        trainer_class = TaughtPipeTransformerTrainer if change == "taught" else trainer_class
        trainer = (SharpPipelineTrainer if change == "sharp" else trainer_class)(built, args, **data)
    if change == "predict_first":
        rows = make_rows(model, 5)
        trainer.predict([{key: value for key, value in row.items() if key != "labels"} for row in rows])
    trainer.train()
    return {
        "losses": losses_of(trainer),
        "evaluated": trainer.evaluate()["eval_count"] if change == "evaluate_three" else None,
        "metrics": {name: value for name, value in trainer.evaluate().items() if name in METRICS}
        if change == "sharp"
        else None,
    }


SECONDS = 150

pytestmark = pytest.mark.distributed


def result(folder: Path, kind: str, model: str, change: str, **options: Any) -> dict[str, Any]:
    """One run, plain on one process or ours on two."""
    options = {"kind": kind, "model": model, "change": change, **options}
    found: dict[str, Any] = run(losses, folder / kind, 1 if kind == "plain" else 2, options, timeout=SECONDS)[0]
    return found


def test_replicas_pad_alike_where_the_loss_sees_padding(tmp_path: Path):
    """BERT's answers are a softmax over positions, padding included (field of question answering)."""
    plain = result(tmp_path, "plain", "bert_question", "pad_to_the_longest")
    ours = result(tmp_path, "ours", "bert_question", "pad_to_the_longest", num_stages="1")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_predicting_without_labels_first_changes_no_training(tmp_path: Path):
    plain = result(tmp_path, "plain", "vit", "predict_first")
    ours = result(tmp_path, "ours", "vit", "predict_first")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_loss_that_reads_the_images_in_training_gets_them_on_the_last_stage(tmp_path: Path):
    plain = result(tmp_path, "plain", "vit", "taught")
    ours = result(tmp_path, "ours", "vit", "taught")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_trainer_of_somebody_else_gets_a_pipeline(tmp_path: Path):
    """Its loss and its predictions stay: the numbers are those of that trainer alone."""
    plain = result(tmp_path, "plain", "vit", "sharp")
    ours = result(tmp_path, "ours", "vit", "sharp")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["metrics"]["eval_sharpness"] > 0
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)


def test_a_users_evaluation_sampler_decides_how_many_samples_count(tmp_path: Path):
    ours = result(tmp_path, "ours", "vit", "evaluate_three", num_stages="1")
    assert ours["evaluated"] == 3


@scenario
def sends_what_differs(folder: Path) -> dict[str, Any]:
    """Send a model whose head each rank drew for itself; return the number of broadcasts and the sums of the head."""
    dist.init_process_group("gloo")
    model = build_model("vit", 3)
    torch.manual_seed(RANK)
    torch.nn.init.normal_(model.classifier.weight)
    topology, counts, own = get_topology(60.0), [], dist.broadcast

    def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        counts.append(tensor.numel())
        return own(tensor, *args, **options)

    before = float(model.classifier.weight.sum())
    dist.broadcast = counting
    send_model_from_first_rank(model, topology)
    sums = [float(parameter.double().sum()) for parameter in model.parameters()]
    size = model.classifier.weight.numel()
    dist.destroy_process_group()
    return {"sent": counts, "head": size, "before": before, "sums": sums}


def test_of_equal_weights_nothing_is_sent_before_the_first_step(tmp_path: Path):
    first, second = run(sends_what_differs, tmp_path, 2, timeout=SECONDS)
    assert first["before"] != second["before"] and first["sums"] == second["sums"]
    assert first["sent"] == second["sent"] == [first["head"]]


@scenario
def evaluates(folder: Path, reads: str | None) -> dict[str, Any]:
    """Evaluate on two stages with metrics that read `logits`, or `classes` by preprocessing, or nothing.

    Logits are as good as too large to be computed for a whole batch where little of them is kept.

    Returns the metrics and what the last stage held of each micro-batch's output at the end.
    """
    calls: list[tuple[list[int], list[int]]] = []

    def to_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append((list(logits.shape), list(labels.shape)))
        return logits.argmax(-1)

    def accuracy(prediction: Any) -> dict[str, float]:
        found = prediction.predictions if reads == "classes" else prediction.predictions.argmax(-1)
        return {"accuracy": float((found == prediction.label_ids).mean()), "first": float(found[0])}

    args = PipeTransformerArguments(
        output_dir=str(folder), pipeline_parallel_size="2", per_device_eval_batch_size=8, use_cpu=True,
        report_to="none", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = PipeTransformerTrainer(
        build_model("vit", 3), args, eval_dataset=make_dataset("vit", 16), data_collator=collate,
        compute_metrics=accuracy if reads else None,
        preprocess_logits_for_metrics=to_classes if reads == "classes" else None,
    )  # fmt: skip
    held: list[list[dict[str, list[int]]]] = []
    own = execution.join_outputs

    def joining(outputs: Any, weights: Any, join: Any) -> Any:
        if isinstance(outputs[0], dict):
            held.append([{key: list(value.shape) for key, value in output.items()} for output in outputs])
        return own(outputs, weights, join)

    execution.join_outputs, execution.JOINED_BYTES = joining, 0
    found = trainer.evaluate()
    metrics = {key: found[key] for key in ("eval_loss", "eval_accuracy", "eval_first") if key in found}
    predicted = trainer.predict(trainer.eval_dataset).predictions if reads else None
    is_restored = trainer.preprocess_logits_for_metrics is (to_classes if reads == "classes" else None)
    return {
        "metrics": metrics, "held": held, "calls": calls, "is_restored": is_restored,
        "predicted": None if predicted is None else predicted.tolist(),
    }  # fmt: skip


def test_of_a_loss_only_evaluation_no_logits_are_kept(tmp_path: Path):
    """The memory of the last stage must not grow with the number of micro-batches: a vocabulary's logits are large."""
    lean = run(evaluates, tmp_path / "lean", 2, {"reads": None}, timeout=SECONDS)[1]
    full = run(evaluates, tmp_path / "full", 2, {"reads": "logits"}, timeout=SECONDS)[1]
    assert lean["metrics"]["eval_loss"] == pytest.approx(full["metrics"]["eval_loss"], rel=1e-6)
    assert full["held"] == [], "logits that are read are computed for the whole batch, which every rank gets"
    assert lean["held"] and all(set(held) == {"loss"} for outputs in lean["held"] for held in outputs)
    assert max(map(len, lean["held"])) > 1


def test_logits_are_preprocessed_for_metrics_one_micro_batch_at_a_time(tmp_path: Path):
    """What joins and travels is what the user's function returned; every rank gets it, and the same metrics."""
    full = run(evaluates, tmp_path / "full", 2, {"reads": "logits"}, timeout=SECONDS)
    lean = run(evaluates, tmp_path / "lean", 2, {"reads": "classes"}, timeout=SECONDS)
    for ours, other in zip(lean, full, strict=True):
        assert ours["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
        assert ours["predicted"] == [row.index(max(row)) for row in other["predicted"]]
        assert ours["is_restored"]
    assert lean[0]["calls"] == [], "only the last stage has logits"
    outputs = [held for outputs in lean[1]["held"] for held in outputs]
    assert len(lean[1]["calls"]) == len(outputs) > len(lean[1]["held"])
    for held, (logits, labels) in zip(outputs, lean[1]["calls"], strict=True):
        assert held == {"loss": [], "preprocessed": labels}
        assert logits[:-1] == labels


BY_BATCHES = {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]}
APART = {"eval_do_concat_batches": False, "eval_accumulation_steps": 1, "include_for_metrics": ["inputs", "loss"]}
NUM_ROWS = 5
"""Samples of a batch of the plain Trainer."""


class SeenMetrics:
    """Metrics of everything that there is to see, of whole data sets or batch by batch, and what they were given."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.num_calls = 0

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        self.num_calls += 1
        given = {"logits": prediction.predictions, "labels": prediction.label_ids, "inputs": prediction.inputs}
        for name, parts in given.items():
            for part in parts if isinstance(parts, list) else [] if parts is None else [parts]:
                values = part["pixel_values"] if isinstance(part, dict) else part
                self.sums[name] = self.sums.get(name, 0.0) + float(abs(torch.as_tensor(values).double()).sum())
        return {"sums": dict(self.sums), "label": np.float32(self.sums["labels"])} if compute_result else {}


def kept_bytes(tree: Any) -> int:
    """Memory that tensors and arrays keep alive, also where they are views of it."""
    if isinstance(tree, (list, tuple)):
        return sum(map(kept_bytes, tree))
    if isinstance(tree, torch.Tensor):
        return tree.untyped_storage().nbytes()
    return 0 if tree is None else kept_bytes(torch.as_tensor(tree))


@scenario
def measures(
    folder: Path, num_stages: str, num_samples: int, schedule: str = "1f1b", **options: Any
) -> dict[str, Any]:
    """Evaluate with metrics; return them, and the most bytes that Trainer's loop kept beside the losses."""
    most, seen, heard = 0, SeenMetrics(), []
    own = EvalLoopContainer.add

    def adding(container: EvalLoopContainer, tensors: Any) -> None:
        nonlocal most
        own(container, tensors)
        is_loss = isinstance(tensors, torch.Tensor) and tensors.dim() == 1 and tensors.is_floating_point()
        most = most if is_loss else max(most, kept_bytes(container.tensors) + kept_bytes(container.arrays))

    class Hears(TrainerCallback):
        def on_evaluate(self, *args: Any, metrics: Any = None, **kwargs: Any) -> None:
            heard.append(untimed(metrics))

    EvalLoopContainer.add = adding  # type: ignore[method-assign]
    plain = num_stages == "plain"
    kind = TrainingArguments if plain else PipeTransformerArguments
    own_options = {} if plain else {"pipeline_parallel_size": num_stages, "pipeline_schedule": schedule}
    args = kind(
        output_dir=str(folder), per_device_eval_batch_size=NUM_ROWS, use_cpu=True, report_to="none",
        disable_tqdm=True, seed=3, **own_options, **options,
    )  # fmt: skip
    trainer = (Trainer if plain else PipeTransformerTrainer)(
        build_model("vit", 3), args, eval_dataset=make_dataset("vit", num_samples), data_collator=collate,
        compute_metrics=seen, callbacks=[Hears()],
    )  # fmt: skip
    found = untimed(trainer.evaluate())
    EvalLoopContainer.add = own  # type: ignore[method-assign]
    seen.sums, seen.num_calls, num_calls = {}, 0, seen.num_calls
    predicted = trainer.predict(trainer.eval_dataset)
    rows = predicted.predictions if isinstance(predicted.predictions, list) else [predicted.predictions]
    return {
        "metrics": found, "heard": heard, "kept": most, "num_calls": num_calls,
        "predicted": sum(len(each) for each in rows), "sums": predicted.metrics["test_sums"],
        "is_restored": trainer.compute_metrics is seen,
    }  # fmt: skip


def assert_close(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_close(found[name], value)
        else:
            assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize(
    ("num_processes", "num_stages", "schedule", "options"),
    [
        (2, "2", "1f1b", {}), (2, "2", "1f1b", BY_BATCHES), (2, "2", "zb_v", APART), (2, "1", "1f1b", APART),
        (4, "2", "1f1b", APART),
    ],
)  # fmt: skip
def test_rank_0_alone_keeps_logits_and_every_rank_gets_its_metrics(
    tmp_path: Path, num_processes: int, num_stages: str, schedule: str, options: dict[str, Any]
) -> None:
    asked = {"num_stages": "plain", "num_samples": 43, **options}
    (plain,) = run(measures, tmp_path / "plain", 1, asked, timeout=SECONDS)
    asked = {"num_stages": num_stages, "schedule": schedule, **options}
    few = run(measures, tmp_path / "few", num_processes, {**asked, "num_samples": 23}, timeout=SECONDS)
    ranks = run(measures, tmp_path / "many", num_processes, {**asked, "num_samples": 43}, timeout=SECONDS)
    for rank, found in enumerate(ranks):
        assert_close(found["metrics"], plain["metrics"])
        assert found["heard"] == [found["metrics"]] and found["is_restored"]
        assert (found["predicted"], found["num_calls"] > 0) == (43, rank == 0)
        assert_close(found["sums"], plain["sums"])
    if options is not BY_BATCHES:
        assert few[0]["kept"] < ranks[0]["kept"]
    assert [found["kept"] for found in (*few[1:], *ranks[1:])] == [0] * 2 * (num_processes - 1)


@scenario
def fails_in_metrics(folder: Path, how: str, where: str) -> dict[str, Any]:
    """Evaluate with metrics that raise an error, communicate, or return what cannot be sent."""

    def metrics(_prediction: Any) -> Any:
        if how == "raises":
            raise KeyError("no such word")
        if how == "communicates":
            ones = torch.ones(1)
            dist.all_reduce(ones)
            return {"ranks": float(ones)}
        return {"figure": object()}

    args = PipeTransformerArguments(
        output_dir=str(folder), pipeline_parallel_size="2", use_cpu=True, report_to="none", disable_tqdm=True,
        pipeline_compute_metrics=where,
    )  # fmt: skip
    trainer = PipeTransformerTrainer(
        build_model("vit", 3), args, eval_dataset=make_dataset("vit", 8), data_collator=collate,
        compute_metrics=metrics,
    )  # fmt: skip
    try:
        return {"metrics": trainer.evaluate()["eval_ranks"]}
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)}


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raises", "KeyError", "no such word"),
        ("communicates", "ValueError", "pipeline_compute_metrics='every_rank'"),
        ("returns", "ValueError", "returned object as 'figure'"),
    ],
)
def test_every_rank_learns_why_metrics_failed(tmp_path: Path, how: str, kind: str, text: str) -> None:
    first, second = run(fails_in_metrics, tmp_path, 2, {"how": how, "where": "first_rank"}, timeout=SECONDS)
    assert first["kind"] == kind and text in first["text"]
    assert second["kind"] == "PipelineError" and "failed on rank 0" in second["text"] and text in second["text"]


def test_metrics_may_communicate_where_every_rank_computes_them(tmp_path: Path) -> None:
    options = {"how": "communicates", "where": "every_rank"}
    assert run(fails_in_metrics, tmp_path, 2, options, timeout=SECONDS) == [{"metrics": 2.0}] * 2


class Tower(PreTrainedModel):
    """A model of somebody's own around one of a known family, with outputs that have no row a sample."""

    config_class = ViTConfig
    _supports_sdpa = True

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.tower = ViTModel(config, add_pooling_layer=False)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(config.hidden_size, 2) for _ in range(3)])
        self.post_init()

    def outputs(self, hidden: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        tasks = torch.cat([head(hidden[:, 0]) for head in self.heads])
        loss = torch.nn.functional.cross_entropy(tasks, labels.repeat(3) % 2)
        return {
            "loss": loss, "tasks": tasks, "mean": {"of all": tasks.mean(), "like": hidden[:, 0] @ hidden[:, 0].T},
            "centered": (tasks - tasks.mean(0), self.heads[0].weight.clone()),
        }  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return self.outputs(self.tower(pixel_values).last_hidden_state, labels)


class CallsParts(Trainer):
    """A loss that runs the parts of the model by itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_kwargs: Any) -> Any:
        bare = getattr(model, "module", model)
        labels = inputs.pop("labels")
        outputs = bare.outputs(bare.tower(inputs["pixel_values"]).last_hidden_state, labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def arrays_of(tree: Any) -> list[Any]:
    """All arrays of nested predictions, as lists."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else None
    return [np.asarray(tree).tolist()] if inner is None else [each for part in inner for each in arrays_of(part)]


@scenario
def outputs_of(folder: Path, is_plain: bool, calls_parts: bool, ignored: list[str] | None, **options: Any) -> Any:
    """Evaluate and predict 20 samples in batches of 8; return losses, metrics and predictions."""
    base = CallsParts if calls_parts else Trainer
    kind = base if is_plain else type("Piped", (PipeTransformerMixin, base), {})
    args = (TrainingArguments if is_plain else PipeTransformerArguments)(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, seed=3, **options
    )
    torch.manual_seed(3)
    model = Tower(build_model("vit", 3).config)
    trainer = kind(
        model, args, eval_dataset=make_dataset("vit", 20), data_collator=collate,
        compute_metrics=lambda found: {"arrays": arrays_of(found.predictions)},
        preprocess_logits_for_metrics=None if ignored else lambda logits, labels: logits,
    )  # fmt: skip
    found = trainer.evaluate(ignore_keys=ignored)
    predicted = trainer.predict(trainer.eval_dataset, ignore_keys=ignored)
    trainer.compute_metrics = None
    lean = trainer.evaluate()["eval_loss"]
    return [found["eval_loss"], found["eval_arrays"], arrays_of(predicted.predictions), lean]


@pytest.mark.parametrize(("calls_parts", "ignored"), [(False, ["tasks"]), (True, None), (False, None)])
def test_outputs_of_any_shape_are_those_of_one_process(
    tmp_path: Path, calls_parts: bool, ignored: list[str] | None
) -> None:
    """Scalars, tensors over all pairs, values that read other samples, heads stacked task by task, weights."""
    told = {"calls_parts": calls_parts, "ignored": ignored}
    plain = run(
        outputs_of, tmp_path / "plain", 1, {"is_plain": True, "per_device_eval_batch_size": 8, **told}, timeout=SECONDS
    )[0]
    ours = run(
        outputs_of, tmp_path / "ours", 2,
        {"is_plain": False, "per_device_eval_batch_size": 4, "pipeline_parallel_size": 2, **told}, timeout=SECONDS,
    )  # fmt: skip
    one = run(
        outputs_of, tmp_path / "one", 1,
        {"is_plain": False, "per_device_eval_batch_size": 8, "pipeline_parallel_num_microbatches": 2, **told},
        timeout=SECONDS,
    )  # fmt: skip
    for found in (*ours, *one):
        assert [np.shape(each) for each in found[2]] == [np.shape(each) for each in plain[2]]
        for values, wanted in zip(_flat(found), _flat(plain), strict=True):
            assert values == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def _flat(tree: Any) -> list[float]:
    return [value for part in tree for value in _flat(part)] if isinstance(tree, list) else [tree]
