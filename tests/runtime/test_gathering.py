"""What a model on several stages gives to code that reads it."""

from __future__ import annotations

import pytest
import torch

from hf_pipetransformer.runtime.gathering import check_state_dicts


def test_a_state_dict_without_values_of_other_stages_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for _ in range(2):  # Each training asks for it.
        check_state_dicts(model)
    assert len(model._state_dict_hooks) == 1
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    model[1].to("meta")
    assert model.state_dict(keep_vars=True)["1.bias"].is_meta, "as the library itself reads it"
    with pytest.raises(ValueError, match=r"no values for 2 of 4 tensors, '1.weight' for one"):
        model.state_dict()
