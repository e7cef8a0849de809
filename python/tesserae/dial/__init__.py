"""The dial: degrees that change while training runs.

turning.py    tsm.reshard: the script turns it
automatic.py  the configuration's schedule, requests from outside and the automatic choice turn it
resharding.py the change itself
moving.py     the state of optimizers, on its way
"""
