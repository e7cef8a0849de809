"""A script goes on in the same processes when a rank is lost, and changes its number of ranks while it runs.

loop.py    tsm.elastic: epochs of the job, one after the other
job.py     what train() is given: steps that begin where the state in memory ends, and save it
"""
