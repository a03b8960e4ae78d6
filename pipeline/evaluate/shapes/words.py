"""The words of choices, and the words that things and scenes are named by."""

from __future__ import annotations

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "moon")
COLORS = ("red", "green", "blue", "yellow", "purple", "cyan", "orange", "white")
SCENES = ("stripes", "checker", "dots", "bricks", "waves", "plain")
CORNERS = ("top-left", "top-right", "bottom-left", "bottom-right")
QUARTERS = ("first", "second", "third", "fourth")
NUMBERS = ("one", "two", "three", "four")
#: The words of signs, whose letters can be told apart in 3 x 5 pixels.
SIGNS = ("HI", "UP", "AT", "IF", "OX", "HE", "TO", "LO")
