"""A real three-node Kubernetes for tests, with or without a container engine.

`python3 -m tests.cluster up` starts it; README.md in this folder explains it. Standard library only, because it
is the first thing that runs on a new machine, before any virtual environment exists.
"""
