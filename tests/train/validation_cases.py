"""Cases of the validation tests, run inside pool workers."""

from phalanx.train.validator import Validator
from tests.cases import connect


def train(args):
    """Run two steps, with a validation before each and after the last if there are sets. Return what the ranks report,
    and the bits of what they hold."""
    rank = connect(args)
    validator = Validator(rank.job, rank.coord, args["sets"], lambda event: None)
    replicas, said = list(range(rank.job.layout.replica)), []
    for step in range(3):
        if args["sets"]:
            said.append(validator.run(rank.engine, replicas, lambda: True))
        if step < 2:
            rank.engine.step(rank.batches(step))
    digest = rank.state.digest()
    rank.close()
    return {"said": said, "digest": digest}
