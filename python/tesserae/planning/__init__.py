"""Plans of models that scripts make: `tsm.plan`, and `tesserae plan --script`, which starts this package.

batches.py   the batch that a script gives its model
tracing.py   what a model of a script computes and keeps, without its memory or its time
program.py   the program of this package, which plans
planned.py   tsm.plan
"""
