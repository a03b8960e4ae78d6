"""The selection of tokens, Eqs. (9)-(12), in a readable and several fast forms."""
