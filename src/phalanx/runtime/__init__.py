"""Processes: the node, its zygote, the workers, and the launcher that watches over a gang. No torch."""
