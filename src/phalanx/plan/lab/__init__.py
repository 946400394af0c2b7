"""Fit the cost model to published runs and score it on them. Planning loads nothing from here."""
