"""What a layout costs: seconds of a step and bytes of a rank, in closed form."""
