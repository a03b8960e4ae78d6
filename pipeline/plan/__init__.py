"""Forecasts of runs from rates, without Ray, model weights or videos."""
