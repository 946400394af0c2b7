"""One module per engine that owns nodes: the values of `--on`. An adapter only starts `phalanx agent --join` in the
right places, and tells the agents what it knows of their nodes. `engines.table` lists the other functions of a
module."""
