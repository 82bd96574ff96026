"""Other packages that do a part of the same job, measured beside ours.

Each runs in a process and an environment of its own, which is made when it is first needed: none
of them is a dependency of the project, and one wants a newer Python than others. Blocks of both
sides run in turns: a process that is not asked does nothing.
"""
