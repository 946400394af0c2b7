"""The worker: the step loop, the engine, the optimizer, precision."""
