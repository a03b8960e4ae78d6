"""Decoded frames -> what an encoder takes, bit for bit as the stock processors do: the part that runs where videos are decoded."""
