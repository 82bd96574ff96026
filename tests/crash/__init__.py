"""The crash matrix: each process killed, and each server restarted, at each step of a request.

``points`` has the steps as data, ``faults`` strikes inside of a process; ``tasks`` and ``client``
are what runs there. ``run`` is one run with a fault, ``checks`` what has to hold after it,
``matrix`` has the servers. ``docs/crash-matrix.md`` tells how to read it.
"""
