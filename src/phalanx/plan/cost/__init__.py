"""The cost of a layout: seconds of a step and bytes of a rank, in closed form."""
