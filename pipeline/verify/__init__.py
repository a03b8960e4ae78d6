"""Whether every file of a cache holds what was committed, and what was left behind by runs that broke off."""
