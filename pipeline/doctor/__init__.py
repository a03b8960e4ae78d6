"""``jobs.doctor`` checks a machine or a cluster before a run, and reports what is wrong and how to fix it."""
