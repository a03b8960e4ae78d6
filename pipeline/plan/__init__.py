"""Forecasts of runs from rates. This package uses no Ray, model weights or videos; callers pass the numbers in."""
