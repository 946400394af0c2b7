"""The gang scheduler decides which gang runs where and when. It is pure, like all of `control`."""
