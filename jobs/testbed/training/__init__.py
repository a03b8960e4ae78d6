"""Trains the model `shapes`: a LLaVA-OneVision of a million parameters, from nothing, on one CPU.

Both halves are trained apart and meet in a space that is fixed beforehand (``space``): the vision part learns to say of
each cell what is in it (``vision``), the language part to answer questions from tokens that say it (``language``), at
first from such as nobody had to see. Nothing here is used by the product: what it makes is a checkpoint like any other.
"""
