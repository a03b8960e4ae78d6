"""Eqs. 9-12, the selection of tokens, in a readable form and fast forms: all select the same tokens in one order."""
