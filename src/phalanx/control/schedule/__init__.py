"""The gang scheduler: which gang runs where and when. Pure, like all of `control`."""
