"""Eqs. 9-12 in every form: whatever the form, the same tokens are selected in the same order."""
