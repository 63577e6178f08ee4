"""Names of steps: one name for a step, one step for a name, and no other names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.manager.retention import StepNames

TEMPLATES = ("step-{step:08d}", "{step}", "epoch_{step:02d}", "run.{step}.ckpt", "a{step:012d}-b")


@pytest.mark.parametrize(
    ("template", "step", "name"),
    [
        ("step-{step:08d}", 1000, "step-00001000"),
        ("step-{step:08d}", 123456789, "step-123456789"),
        ("{step}", 0, "0"),
        ("epoch_{step:02d}", 7, "epoch_07"),
        ("run.{step}.ckpt", 12, "run.12.ckpt"),
    ],
)
def test_a_name_is_spelt_by_the_template(template: str, step: int, name: str) -> None:
    """Steps get the digits that the template asks for, more where they need more."""
    names = StepNames(template)
    assert names.name_of(step) == name
    assert names.name_of(np.int64(step)) == name
    assert names.step_of(name) == step


@given(template=st.sampled_from(TEMPLATES), name=st.text(max_size=20))
def test_a_name_is_one_that_a_step_has_or_none(template: str, name: str) -> None:
    """What is read as a step's name is exactly what that step is called."""
    names = StepNames(template)
    step = names.step_of(name)
    assert step is None or names.name_of(step) == name


@pytest.mark.parametrize(
    "name",
    [
        "step-1000",
        "step-0000001000",
        "step--0001000",
        "step-0000\uff11000",
        "",
        "step-00001000.tmp",
        "step-" + "9" * 30,
    ],
)
def test_other_names_are_not_steps(name: str) -> None:
    """A name that differs in any way is something else, and so nobody's to delete."""
    assert StepNames("step-{step:08d}").step_of(name) is None


@pytest.mark.parametrize(
    "template",
    [
        "step",
        "{step}-{step}",
        "a/{step}",
        ".{step}",
        "{step:8d}",
        "v2{step}",
        "a\\{step}",
    ],
)
def test_a_template_that_gives_no_clear_names_is_refused(template: str) -> None:
    """No field, two, other formats, digits beside the step's, hidden or nested folders."""
    with pytest.raises(InvalidInputError, match="step-"):
        StepNames(template)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 1 << 63])
def test_what_is_no_step_is_refused(step: Any) -> None:
    """Only whole numbers from 0 on are steps."""
    with pytest.raises(InvalidInputError, match="no step"):
        StepNames().name_of(step)
