"""Times of collectives on machines that are not at hand: plan model, residual, band.

`table` reads measurements, `plans` holds the formulas, `systems` fits their figures, `residual` interpolates what they
miss, `bands` says how far predictions may be off, `validate` measures it. The command is `python -m jaxcomm.simulate`.
"""
