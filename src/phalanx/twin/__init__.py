"""The twin: a simulated fleet that the real control code drives. See docs/twin.md."""
