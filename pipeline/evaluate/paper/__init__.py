"""The paper's tables and figures from results of several benchmarks that are there: nothing is asked or encoded."""
