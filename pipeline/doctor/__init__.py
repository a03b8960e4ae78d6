"""``jobs.doctor`` looks at a machine or a cluster before a run: what is wrong there, and what to do about it."""
