"""Which layout is best: every layout there is, judged by the cost model."""
