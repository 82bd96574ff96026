"""The crash matrix: each process killed, and each server restarted, at each step of a request.

``points`` has the steps as data, ``faults`` strikes inside of a process, ``app`` and ``client`` are
what runs, ``matrix`` runs one cell and checks what is left. ``docs/crash-matrix.md`` tells how to
read it.
"""
