"""The scripts of transformers with two names changed, as `compare_examples.py` changes them."""

from __future__ import annotations

from tests.conformance.compare_examples import swapped


SCRIPT = '''"""A script for Trainer."""
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint
def main():
    parse = lambda: ("größer", Trainer, TrainingArguments)  # Trainer
    if parse():
        trainer = Trainer(args=parse())
    else:
        trainer = None
if __name__ == "__main__":
    main()
'''
EXPECTED = '''"""A script for Trainer."""
from transformers import HfArgumentParser
from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerArguments
from transformers.trainer_utils import get_last_checkpoint
def main():
    parse = lambda: ("größer", PipeTransformerTrainer, PipeTransformerArguments)  # Trainer
    if parse():
        trainer = PipeTransformerTrainer(args=parse())
    else:
        trainer = None
    trainer.end()
if __name__ == "__main__":
    main()
'''


def test_two_names_change_and_one_line_comes_at_the_end() -> None:
    assert swapped(SCRIPT) == EXPECTED


def test_a_module_that_only_subclasses_trainer_changes_its_base() -> None:
    text = "from transformers import Trainer\nclass Own(Trainer):\n    pass\n"
    assert swapped(text) == (
        "from hf_pipetransformer import PipeTransformerTrainer\nclass Own(PipeTransformerTrainer):\n    pass\n"
    )
