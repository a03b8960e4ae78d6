"""What the errors promise to whoever catches them."""

import pickle

import pytest

import gstep
from gstep.errors import MissingEvidence, ModelError, UnsupportedVideo


@pytest.mark.parametrize("kind", [ModelError, MissingEvidence, UnsupportedVideo])
def test_an_error_is_a_value_error_and_keeps_its_message_between_processes(kind):
    again = pickle.loads(pickle.dumps(kind("name the remedy")))  # noqa: S301 - our own bytes
    assert type(again) is kind and isinstance(again, ValueError) and str(again) == "name the remedy"
    assert gstep.MissingEvidence is MissingEvidence
