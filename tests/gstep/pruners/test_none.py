"""The method that keeps every token."""

from __future__ import annotations

import pytest

import gstep
from tests.gstep.synthetic import video


def test_none_refuses_a_smaller_budget() -> None:
    with pytest.raises(ValueError, match="keeps all 6 tokens; got budget 5"):
        gstep.prune(video(2, 3, 4), method="none", budget=5)
