"""Decoded frames -> what an encoder takes, bit for bit as the stock processors do; runs where videos are decoded."""
