"""The engines that own nodes, a module each: what `--on` may name. An adapter only starts `phalanx agent --join` in the
right places, and tells the agents what it knows of their nodes; the table says what else a module has."""
