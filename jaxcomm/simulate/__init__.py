"""Times of collectives on machines that are not at hand: plan model, residual, band.

`table` reads measurements, `plans` holds the formulas, `systems` fits their parameters, `residual` interpolates
their errors, `bands` holds the quantiles of these errors, `validate` reports them.
The command is `python -m jaxcomm.simulate`.
"""
