"""A gang in simulated time: real control code, and actors that obey the protocol on a network that does not."""
