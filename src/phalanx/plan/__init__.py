"""The planner: what a layout costs on a cluster, and which one is best."""
