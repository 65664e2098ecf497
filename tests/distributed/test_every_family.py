"""Every class of transformers for text, images or sound: two stages follow Trainer, or a sentence says why not.

A class that is refused has to be trained by Trainer with all defaults, with its numbers (`family_runs`). Each change
runs a twentieth of the classes, and one of each family that once crashed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.family_runs import run
from tests.support.every_family import LEFT_OUT, every_subject


pytestmark = [
    pytest.mark.distributed,
    # The first test waits for all classes.
    pytest.mark.timeout(5400),
]

ONCE_BROKEN = {
    "CLIPForImageClassification",
    "CTRLLMHeadModel",
    "CanineForSequenceClassification",
    "CpmAntForCausalLM",
    "Data2VecAudioForSequenceClassification",
    "DebertaForSequenceClassification",
    "HubertForCTC",
    "HubertForSequenceClassification",
    "IBertForSequenceClassification",
    "Llama4ForConditionalGeneration-llama4-images",
    "LongformerForSequenceClassification",
    "MarkupLMForSequenceClassification",
    "NanoChatForCausalLM",
    "NystromformerForSequenceClassification",
    "OpenAIGPTLMHeadModel",
    "ProphetNetForCausalLM",
    "SEWForSequenceClassification",
    "SmolVLMForConditionalGeneration-smolvlm-images",
    "SqueezeBertForSequenceClassification",
    "Wav2Vec2ForCTC",
    "Wav2Vec2ForSequenceClassification",
}

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "families.json"


def _selectable() -> Iterator[Any]:
    for index, subject in enumerate(every_subject()):
        runs_always = index % 20 == 0 or subject.name in ONCE_BROKEN
        yield pytest.param(subject.name, id=subject.name, marks=() if runs_always else pytest.mark.slow)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of the classes that the selected tests ask for, all of which run together."""
    own = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    items = [item for item in own if "outcomes" in getattr(item, "fixturenames", ())]
    wanted = {item.callspec.params["name"] for item in items}
    selected = [subject for subject in every_subject() if subject.name in wanted]
    return run(selected, tmp_path_factory.mktemp("families"), in_parts=len(selected) > 200)


@pytest.mark.parametrize("name", list(_selectable()))
def test_a_class_follows_trainer_or_is_left_to_it(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    found = outcomes[name]
    if found["outcome"] == "skipped":
        pytest.skip(found["reason"])
    assert found["outcome"] in ("equal", "refused"), json.dumps(found, indent=1)
    fine = ("as Trainer", "fails as Trainer", "trained by one stage on two replicas")
    assert found.get("defaults", "as Trainer").startswith(fine), found["defaults"]


def test_the_lists_name_classes_that_exist() -> None:
    names = {subject.name for subject in every_subject()}
    assert names >= ONCE_BROKEN | LEFT_OUT.keys()


def test_the_record_is_of_every_class() -> None:
    """Run `make families` if it is not."""
    record = json.loads(RECORD.read_text())
    if record["versions"]["transformers"] == version("transformers"):
        assert record["classes"].keys() == {subject.name for subject in every_subject()}
    assert sum(record["counts"].values()) == len(record["classes"])
