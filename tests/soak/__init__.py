"""The soak: noisy work of several tenants, with everything that goes wrong in between.

``python -m tests.soak --jobs 2000`` runs it and ends with a verdict. :mod:`plan` says what each job
is, :mod:`app` does it, :mod:`chaos` gets in its way, :mod:`run` puts them together, :mod:`verdict`
says whether all ended as planned.
"""
