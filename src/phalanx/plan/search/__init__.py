"""Find the best layout: the cost model judges every possible one."""
