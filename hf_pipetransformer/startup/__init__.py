"""What happens before the first step: the ranks compare notes, the model is probed, rank 0 plans the first layout."""

from hf_pipetransformer.startup.costs import samples_per_microbatch
from hf_pipetransformer.startup.model import Subject, main_input_of
from hf_pipetransformer.startup.planner import RunPlanner
from hf_pipetransformer.startup.start import StartUp, check_agreement, look_at


__all__ = ["RunPlanner", "StartUp", "Subject", "check_agreement", "look_at", "main_input_of", "samples_per_microbatch"]
